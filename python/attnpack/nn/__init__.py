"""The modules: `nn.Module`s around the native operators, with the names and parameters of the C++ modules."""
