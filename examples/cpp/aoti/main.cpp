// Runs a layer that AOTInductor has compiled. The package holds the compiled graph and the weights. It finds attnpack's
// operators in this process, because the program links libattnpack.
#include <attnpack/attnpack.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <iostream>
#include <iterator>

// aoti PACKAGE INPUTS OUTPUTS: the tensors are lists, written and read by torch.save and torch.load.
int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: aoti layer.pt2 inputs.pt outputs.pt\n";
    return 2;
  }
  try {
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    const auto list = torch::pickle_load(bytes);
    std::vector<torch::Tensor> inputs;
    for (const auto& tensor : list.toListRef()) inputs.push_back(tensor.toTensor());

    const torch::NoGradGuard no_grad;
    torch::inductor::AOTIModelPackageLoader layer(argv[1]);
    const auto outputs = layer.run(inputs);
    for (const auto& out : outputs) std::cout << "output " << out.sizes() << "\n";

    const auto written = torch::pickle_save(c10::ivalue::Tuple::create({outputs.begin(), outputs.end()}));
    std::ofstream(argv[3], std::ios::binary).write(written.data(), static_cast<std::streamsize>(written.size()));
  } catch (const std::exception& error) {
    std::cerr << "aoti: " << error.what() << "\n";
    return 1;
  }
}
