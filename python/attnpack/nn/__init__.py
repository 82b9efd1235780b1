"""The modules: shells of `torch.nn` around the native operators, by the names and parameters of the C++ modules."""
