#include <attnpack/modules/stack.h>
#include <bindings/common.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

// Makes a part of a block from a Python module. If it is something else, the error names the argument.
template <typename Interface>
Part<Interface> as_part(const char* name, const py::object& module, const char* wanted) {
  if (module.is_none()) return nullptr;
  if (py::isinstance<torch::nn::Module>(module)) {
    const auto ptr = module.cast<ModulePtr>();
    if (dynamic_cast<Interface*>(ptr.get())) return ptr;
  }
  TORCH_CHECK_TYPE(false, "attnpack: ", name, " is ", shown(module), ", wants ", wanted,
                   ": one of attnpack.cpp, which .cpp() of a Python module gives");
}

Part<AttentionModule> as_attention(const char* name, const py::object& module) {
  return as_part<AttentionModule>(name, module, "an attention module");
}

Part<TokenModule> as_feed_forward(const py::object& module) {
  return as_part<TokenModule>("feed_forward", module, "a module such as FeedForward");
}

// forward of an encoder block or stack.
template <typename Impl, typename Class>
void bind_encoder_forward(Class& cls) {
  cls.def(
      "forward",
      [](Impl& self, const at::Tensor& x, const OptionalTensor& mask, const OptionalTensor& positions,
         const OptionalTensor& kv_lens) {
        return self.forward(x, EncoderInputs().mask(mask).positions(positions).kv_lens(kv_lens));
      },
      py::arg("x"), py::kw_only(), py::arg("mask") = py::none(), py::arg("positions") = py::none(),
      py::arg("kv_lens") = py::none(), py::call_guard<py::gil_scoped_release>());
}

// forward of a decoder block or stack.
template <typename Impl, typename Cache, typename Class>
void bind_decoder_forward(Class& cls) {
  cls.def(
      "forward",
      [](Impl& self, const at::Tensor& x, const OptionalTensor& context, const OptionalTensor& mask,
         const std::shared_ptr<Cache>& cache, const OptionalTensor& positions, const OptionalTensor& kv_lens,
         const OptionalTensor& context_mask, const OptionalTensor& context_lens) {
        return self.forward(x, DecoderInputsOf<Cache>()
                                   .context(context)
                                   .mask(mask)
                                   .cache(cache)
                                   .positions(positions)
                                   .kv_lens(kv_lens)
                                   .context_mask(context_mask)
                                   .context_lens(context_lens));
      },
      py::arg("x"), py::arg("context") = py::none(), py::kw_only(), py::arg("mask") = py::none(),
      py::arg("cache") = py::none(), py::arg("positions") = py::none(), py::arg("kv_lens") = py::none(),
      py::arg("context_mask") = py::none(), py::arg("context_lens") = py::none(),
      py::call_guard<py::gil_scoped_release>());
}

template <typename Impl, typename Block>
py::class_<Impl, torch::nn::Module, std::shared_ptr<Impl>> bind_stack(py::module_& m, const char* name,
                                                                      const char* doc) {
  auto cls = bind_module<Impl>(m, name, doc);
  cls.def(py::init([](const std::vector<std::shared_ptr<typename Block::ContainedType>>& layers,
                      const std::optional<std::string>& norm, double eps,
                      const std::shared_ptr<EmbeddingImpl>& embed_tokens) {
            StackOptions<Block> options(std::vector<Block>(layers.begin(), layers.end()));
            options.norm(norm.value_or("none")).eps(eps);
            if (embed_tokens) options.embed_tokens(embed_tokens);
            return Impl(options);
          }),
          py::arg("layers"), py::kw_only(), py::arg("norm") = "rms", py::arg("eps") = 1e-6,
          py::arg("embed_tokens") = py::none());
  return cls;
}

}  // namespace

void register_blocks(py::module_& m) {
  auto encoder_block = bind_module<EncoderBlockImpl>(m, "EncoderBlock", "Self-attention, feed-forward.");
  encoder_block.def(
      py::init([](const py::object& attention, const py::object& feed_forward, const std::string& norm, bool pre_norm,
                  double eps) {
        const auto self_attention = as_attention("attention", attention);  // first, as it is named first
        return EncoderBlockImpl(
            EncoderBlockOptions(self_attention, as_feed_forward(feed_forward)).norm(norm).pre_norm(pre_norm).eps(eps));
      }),
      py::arg("attention"), py::arg("feed_forward"), py::kw_only(), py::arg("norm") = "rms", py::arg("pre_norm") = true,
      py::arg("eps") = 1e-6);
  bind_encoder_forward<EncoderBlockImpl>(encoder_block);

  auto block =
      bind_module<DecoderBlockImpl>(m, "DecoderBlock", "Causal self-attention, cross-attention, feed-forward.");
  block.def(py::init([](const py::object& attention, const py::object& feed_forward, const std::string& norm,
                        bool pre_norm, const py::object& cross_attention, double eps) {
              const auto self_attention = as_attention("attention", attention);
              return DecoderBlockImpl(DecoderBlockOptions(self_attention, as_feed_forward(feed_forward))
                                          .norm(norm)
                                          .pre_norm(pre_norm)
                                          .cross_attention(as_attention("cross_attention", cross_attention))
                                          .eps(eps));
            }),
            py::arg("attention"), py::arg("feed_forward"), py::kw_only(), py::arg("norm") = "rms",
            py::arg("pre_norm") = true, py::arg("cross_attention") = py::none(), py::arg("eps") = 1e-6);
  bind_decoder_forward<DecoderBlockImpl, KVCache>(block);

  auto encoder = bind_stack<EncoderImpl, EncoderBlock>(m, "Encoder", "Encoder blocks and a last norm.");
  bind_encoder_forward<EncoderImpl>(encoder);

  auto decoder = bind_stack<DecoderImpl, DecoderBlock>(m, "Decoder", "Decoder blocks and a last norm.");
  bind_decoder_forward<DecoderImpl, ModelCache>(decoder);

  bind_module<EncoderDecoderImpl>(m, "EncoderDecoder", "An encoder, and a decoder that reads it.")
      .def(py::init([](const std::shared_ptr<EncoderImpl>& encoder, const std::shared_ptr<DecoderImpl>& decoder) {
             return EncoderDecoderImpl(encoder, decoder);
           }),
           py::arg("encoder"), py::arg("decoder"))
      .def(
          "forward",
          [](EncoderDecoderImpl& self, const at::Tensor& source, const at::Tensor& target,
             const OptionalTensor& source_lens, const OptionalTensor& target_lens,
             const std::shared_ptr<ModelCache>& cache) {
            return self.forward(source, target,
                                EncoderDecoderInputs().source_lens(source_lens).target_lens(target_lens).cache(cache));
          },
          py::arg("source"), py::arg("target"), py::kw_only(), py::arg("source_lens") = py::none(),
          py::arg("target_lens") = py::none(), py::arg("cache") = py::none(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace attnpack
