// One model on several processes, in C++ without Python. Each process is started by itself, with its rank:
//
//   distributed 0 2 /tmp/store & distributed 1 2 /tmp/store
//
// The numbers are the rank, the number of processes, and a file that all of them name and that does not exist yet: a
// c10d::FileStore, through which they find each other. On several machines take a c10d::TCPStore.
#include <attnpack/distributed/collectives.h>
#include <attnpack/distributed/context_parallel.h>
#include <attnpack/distributed/sharded_cache.h>
#include <attnpack/distributed/tensor_parallel.h>
#include <attnpack/models/generate.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <algorithm>
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
  const auto whole = attnpack::state_dict(*model);  // a checkpoint of one process, as of load_safetensors
  const auto shares = parallel::tensor_parallel(*model, group);
  attnpack::load_state_dict(*model, shares.part_of(whole));
  for (const auto& [name, tensor] : shares.whole_of(attnpack::state_dict(*model)))
    TORCH_CHECK(tensor.equal(whole.at(name)), "other weights");
  TORCH_CHECK(attnpack::generate(*model, ids, attnpack::GenerateOptions(6)).equal(tokens), "other tokens");
  return distance(model(ids), wanted);
}

// A sequence is shared: the model runs as it is, over the tokens of this rank, and backward sums what each rank has.
double shared_sequence(const parallel::Group& group) {
  const auto layout = parallel::Layout::kZigzag;
  torch::manual_seed(0);
  attnpack::CausalLM model(attnpack::CausalLMOptions(100, 64, 2, 8).num_kv_heads(2));
  const auto ids = at::arange(32).view({2, 16});
  const auto upstream = at::randn({2, 16, 100}) / ids.numel(), wanted = model(ids);  // as of a mean over tokens
  (wanted * upstream).sum().backward();
  const auto weight = model->model->layer(0)->self_attn.as<attnpack::GroupedQueryAttention>()->k_proj->weight;
  const auto gradient = weight.grad().clone();
  model->zero_grad();

  at::Tensor out;
  {
    const auto options = parallel::ContextParallelOptions().method(parallel::Method::kRing).layout(layout);
    const parallel::ContextParallel scope(group, options);
    out = model(parallel::shard_sequence(ids, group, 1, layout));
  }
  (out * parallel::shard_sequence(upstream, group, 1, layout)).sum().backward();
  return std::max(distance(parallel::unshard_sequence(out, group, 1, layout), wanted),
                  distance(parallel::all_reduce(weight.grad(), group), gradient));
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
    const auto sequence = shared_sequence(group);
    const at::NoGradGuard no_grad;
    torch::manual_seed(1);
    const attnpack::RotaryEmbedding rope(8);
    attnpack::GroupedQueryAttention layer(attnpack::GroupedQueryAttentionOptions(64, 8, 2).causal(true).rope(rope));
    const auto x = at::randn({1, 16, 64});
    std::cout << "heads " << shared_heads(group) << " sequence " << sequence << " cache "
              << shared_cache(group, layer, x) << "\n";
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  }
}
