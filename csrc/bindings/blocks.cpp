#include <attnpack/modules/stack.h>
#include <bindings/common.h>
#include <bindings/generate.h>
#include <bindings/register.h>

namespace attnpack {

// A part of a block: a module of attnpack.cpp that has the Interface.
template <typename Interface>
struct Reader<Part<Interface>> {
  static std::optional<Part<Interface>> read(const py::handle& value) {
    if (value.is_none()) return Part<Interface>();
    if (!py::isinstance<torch::nn::Module>(value)) return std::nullopt;
    const auto module = value.cast<std::shared_ptr<torch::nn::Module>>();
    return dynamic_cast<Interface*>(module.get()) ? std::make_optional<Part<Interface>>(module) : std::nullopt;
  }
  static std::string wanted(const std::string&) {
    const bool attention = std::is_same_v<Interface, AttentionModule>;
    return std::string(attention ? "an attention module" : "a module such as FeedForward") +
           ": one of attnpack.cpp, which .cpp() of a Python module gives";
  }
};

// The layers of a stack.
template <typename Block>
struct BlocksReader {
  static std::optional<std::vector<Block>> read(const py::handle& value) {
    if (!py::isinstance<py::list>(value) && !py::isinstance<py::tuple>(value)) return std::nullopt;
    std::vector<Block> blocks;
    for (const auto& item : value) {
      if (!py::isinstance<typename Block::ContainedType>(item)) return std::nullopt;
      blocks.emplace_back(item.cast<std::shared_ptr<typename Block::ContainedType>>());
    }
    return blocks;
  }
  static std::string wanted(const std::string&) {
    return std::string("a list of ") + (std::is_same_v<Block, EncoderBlock> ? "Encoder" : "Decoder") +
           "Blocks of attnpack.cpp";
  }
};
template <>
struct Reader<std::vector<EncoderBlock>> : BlocksReader<EncoderBlock> {};
template <>
struct Reader<std::vector<DecoderBlock>> : BlocksReader<DecoderBlock> {};

template <>
struct Reader<Embedding> {
  static std::optional<Embedding> read(const py::handle& value) {
    if (value.is_none()) return Embedding(nullptr);
    if (!py::isinstance<EmbeddingImpl>(value)) return std::nullopt;
    return Embedding(value.cast<std::shared_ptr<EmbeddingImpl>>());
  }
  static std::string wanted(const std::string& name) { return wanted_by_name(name, false); }
};

namespace {

const std::string& cache_description(const DecoderBlockInputs&) { return kLayerCacheDescription; }
const std::string& cache_description(const DecoderInputs&) { return kModelCacheDescription; }
const std::string& cache_description(const EncoderInputs&) { return kLayerCacheDescription; }

// forward of a block or a stack; `positional` counts x and a context.
template <typename Inputs, typename Class>
void bind_forward(Class& cls, size_t positional) {
  auto names = option_names(Inputs());
  names.insert(names.begin(), "x");
  bind_method(cls, "forward", names, positional, [](typename Class::type& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>("x");
    Inputs inputs;
    arguments.read_options(inputs);
    arguments.finish(cache_description(inputs));
    return without_gil([&] { return self.forward(x, inputs); });
  });
}

template <typename Impl, typename Options, typename Inputs>
void bind_block(py::module_& m, const char* name, const char* doc, size_t positional) {
  auto cls = bind_module<Impl>(m, name, doc);
  using Attention = Part<AttentionModule>;
  using FeedForward = Part<TokenModule>;
  const auto names = option_names(Options(nullptr, nullptr));
  py::options no_signatures;
  no_signatures.disable_function_signatures();
  cls.def(py::init([name](const py::args& args, const py::kwargs& kwargs) {
            return std::make_shared<Impl>(options_of_call<Options, Attention, FeedForward>(name, args, kwargs));
          }),
          signature(name, names, 2).c_str());
  bind_property(cls, "pre_norm", &Impl::pre_norm);
  bind_property(cls, "dropout", &Impl::dropout);
  bind_property(cls, "residual_scale", &Impl::residual_scale);
  if constexpr (requires(Impl impl) { impl.layout; }) {
    bind_property(cls, "layout", &Impl::layout);
    bind_property(cls, "kv_from", &Impl::kv_from);
  }
  bind_forward<Inputs>(cls, positional);
}

template <typename Impl, typename Block, typename Inputs>
void bind_stack(py::module_& m, const char* name, const char* doc, size_t positional) {
  auto cls = bind_module<Impl>(m, name, doc);
  using Options = StackOptions<Block>;
  py::options no_signatures;
  no_signatures.disable_function_signatures();
  cls.def(py::init([name](const py::args& args, const py::kwargs& kwargs) {
            if (kwargs.contains("norm") && kwargs["norm"].is_none()) kwargs["norm"] = "none";
            return std::make_shared<Impl>(options_of_call<Options, std::vector<Block>>(name, args, kwargs));
          }),
          signature(name, option_names(Options({})), 1).c_str());
  bind_property(cls, "embed_scale", &Impl::embed_scale);
  bind_property(cls, "dropout", &Impl::dropout);
  bind_forward<Inputs>(cls, positional);
  if constexpr (requires(Impl impl) { impl.new_cache(); }) {
    bind_method(cls, "new_cache", {}, 0, [](Impl& self, Arguments& arguments) {
      arguments.finish();
      return self.new_cache();
    });
  }
}

template <typename Impl>
std::shared_ptr<Impl> require_stack(Arguments& arguments, const char* name) {
  const auto given = arguments.require<py::object>(name);
  if (!py::isinstance<Impl>(given)) raise_wrong_kind(name, given, wanted_by_name(name, false));
  return given.cast<std::shared_ptr<Impl>>();
}

const std::string kHeadDescription = "a function of the decoder's states [B, E] that gives logits [B, V], or None";

at::Tensor generate_encoder_decoder_py(EncoderDecoderImpl& self, Arguments& arguments) {
  const auto source = arguments.require<at::Tensor>("source"), target = arguments.require<at::Tensor>("target");
  EncoderDecoderGenerateInputs inputs;
  const auto head = arguments.take("head");
  if (head && !head.is_none()) {
    if (!PyCallable_Check(head.ptr())) raise_wrong_kind("head", head, kHeadDescription);
    inputs.head([&head](const at::Tensor& state) {
      py::gil_scoped_acquire acquired;
      return read_value<at::Tensor>("what head returns", head(state), "logits");
    });
  }
  arguments.read_options(inputs, {"head"});
  return run_generate(arguments, [&](const GenerateOptions& o) { return generate(self, source, target, o, inputs); });
}

void bind_encoder_decoder(py::module_& m) {
  using Impl = EncoderDecoderImpl;
  auto cls = bind_module<Impl>(m, "EncoderDecoder", "An encoder, and a decoder that reads it.");
  cls.def(py::init([](const py::args& args, const py::kwargs& kwargs) {
    Arguments arguments("EncoderDecoder", {"encoder", "decoder"}, args, kwargs);
    const auto encoder = require_stack<EncoderImpl>(arguments, "encoder");
    const auto decoder = require_stack<DecoderImpl>(arguments, "decoder");
    arguments.finish();
    return std::make_shared<Impl>(encoder, decoder);
  }));
  bind_method(cls, "new_cross_cache", {}, 0, [](Impl& self, Arguments& arguments) {
    arguments.finish();
    return self.new_cross_cache();
  });
  bind_method(cls, "encode", {"source", "source_lens"}, 1, [](Impl& self, Arguments& arguments) {
    const auto source = arguments.require<at::Tensor>("source");
    OptionalTensor lens;
    arguments.read("source_lens", lens);
    arguments.finish();
    return without_gil([&] { return self.encode(source, lens); });
  });
  bind_method(cls, "decode", {"context", "target", "source_lens", "target_lens", "cache", "cross_cache"}, 2,
              [](Impl& self, Arguments& arguments) {
                const auto context = arguments.require<OptionalTensor>("context").value_or(at::Tensor());
                const auto target = arguments.require<at::Tensor>("target");
                EncoderDecoderInputs inputs;
                arguments.read_options(inputs);
                arguments.finish(kModelCacheDescription);
                return without_gil([&] { return self.decode(context, target, inputs); });
              });
  bind_method(cls, "forward", {"source", "target", "source_lens", "target_lens", "cache", "cross_cache"}, 2,
              [](Impl& self, Arguments& arguments) {
                const auto source = arguments.require<OptionalTensor>("source").value_or(at::Tensor());
                const auto target = arguments.require<at::Tensor>("target");
                EncoderDecoderInputs inputs;
                arguments.read_options(inputs);
                arguments.finish(kModelCacheDescription);
                return without_gil([&] { return self.forward(source, target, inputs); });
              });
  bind_method(cls, "generate", names_of_generate({"source", "target", "head", "source_lens"}), 2,
              &generate_encoder_decoder_py);
}

}  // namespace

void register_blocks(py::module_& m) {
  bind_block<EncoderBlockImpl, EncoderBlockOptions, EncoderInputs>(m, "EncoderBlock", "Self-attention, feed-forward.",
                                                                   1);
  bind_block<DecoderBlockImpl, DecoderBlockOptions, DecoderBlockInputs>(
      m, "DecoderBlock", "Causal self-attention, cross-attention, feed-forward.", 2);
  bind_stack<EncoderImpl, EncoderBlock, EncoderInputs>(m, "Encoder", "Encoder blocks and a last norm.", 1);
  bind_stack<DecoderImpl, DecoderBlock, DecoderInputs>(m, "Decoder", "Decoder blocks and a last norm.", 2);
  bind_encoder_decoder(m);
}

}  // namespace attnpack
