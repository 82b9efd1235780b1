// One model on several processes, in C++ alone. Each process is started by itself, with its rank:
//
//   distributed 0 2 /tmp/store & distributed 1 2 /tmp/store
//
// The numbers are the rank, the number of processes, and a file that all of them name and that does not exist yet: a
// c10d::FileStore, through which they find each other. On several machines take a c10d::TCPStore.
#include <attnpack/distributed/attention.h>
#include <attnpack/distributed/sharded_cache.h>
#include <attnpack/distributed/tensor_parallel.h>
#include <attnpack/models/generate.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <iostream>
#include <string>

namespace parallel = attnpack::distributed;

namespace {

double distance(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

// The heads of all layers are shared: the tokens of one process, though each holds a share of the weights.
double shared_heads(const parallel::Group& group) {
  torch::manual_seed(0);  // the same weights on all ranks; a checkpoint does as well
  attnpack::CausalLM model(attnpack::CausalLMOptions(100, 64, 2, 8).num_kv_heads(1).tie_embeddings(true));
  const auto ids = at::arange(20).view({2, 10});
  const auto wanted = model(ids);
  const auto tokens = attnpack::generate(*model, ids, attnpack::GenerateOptions(6));
  parallel::tensor_parallel(*model, group);
  TORCH_CHECK(attnpack::generate(*model, ids, attnpack::GenerateOptions(6)).equal(tokens), "other tokens");
  return distance(model(ids), wanted);
}

// A sequence is shared: each rank attends with its own rows over the keys of all, and rotates by their places.
double shared_sequence(const parallel::Group& group, attnpack::GroupedQueryAttention& layer, const at::Tensor& x) {
  const auto layout = parallel::Layout::kZigzag;
  const auto part = parallel::shard_sequence(x, group, 1, layout);
  const auto places = parallel::positions(layout, part.size(1), group);
  const auto [q, k, v] = layer->project(part, attnpack::AttentionInputs().positions(places));
  const auto heads = parallel::attention(q, k, v, group, attnpack::AttentionOptions().causal(true), layout);
  const auto out = layer->o_proj(heads.transpose(1, 2).flatten(2));
  return distance(parallel::unshard_sequence(out, group, 1, layout), layer(x));
}

// A cache is shared: each rank holds some positions of a context, and a step joins what they give.
double shared_cache(const parallel::Group& group, attnpack::GroupedQueryAttention& layer, const at::Tensor& x) {
  parallel::ShardedCache cache(group);
  std::vector<at::Tensor> outs;
  for (const auto& part : x.split_with_sizes({x.size(1) - 2, 1, 1}, 1)) {
    const auto places = at::arange(cache.len(), cache.len() + part.size(1));
    const auto [q, k, v] = layer->project(part, attnpack::AttentionInputs().positions(places));
    const auto heads = cache.attend(q, k, v, attnpack::AttentionOptions().causal(true));
    outs.push_back(layer->o_proj(heads.transpose(1, 2).flatten(2)));
  }
  return distance(at::cat(outs, 1), layer(x));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::cerr << "distributed RANK PROCESSES STORE [SECONDS TO WAIT]\n";
    return 2;
  }
  const int rank = std::stoi(argv[1]), size = std::stoi(argv[2]);
  const std::chrono::seconds timeout(argc == 5 ? std::stoi(argv[4]) : 30);
  try {
    const auto store = c10::make_intrusive<c10d::FileStore>(argv[3], size);
    const auto group = parallel::gloo_group(store, rank, size, timeout);
    const at::NoGradGuard no_grad;
    torch::manual_seed(1);
    const attnpack::RotaryEmbedding rope(8);
    attnpack::GroupedQueryAttention layer(attnpack::GroupedQueryAttentionOptions(64, 8, 2).causal(true).rope(rope));
    const auto x = at::randn({1, 16, 64});
    std::cout << "heads " << shared_heads(group) << " sequence " << shared_sequence(group, layer, x) << " cache "
              << shared_cache(group, layer, x) << "\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  }
}
