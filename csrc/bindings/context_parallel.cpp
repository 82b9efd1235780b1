#include <attnpack/core/check.h>
#include <attnpack/layers/sharded_attention.h>
#include <bindings/register.h>

// Python's context_parallel, as the modules of C++ see it.
namespace attnpack {

namespace {

// Modules of C++ would attend only over their own part of a sequence: they do not know Python's ranks.
class PythonContextParallel : public ShardedAttention {
 public:
  at::Tensor attend(const at::Tensor&, const at::Tensor&, const at::Tensor&, const AttendOptions&) const override {
    refuse();
  }
  at::Tensor latent_attend(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                           int64_t, const LatentAttendOptions&) const override {
    refuse();
  }
  at::Tensor positions(int64_t) const override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    ATTNPACK_CHECK(
        false,
        "a module of attnpack.cpp runs under context_parallel, which shards sequences only for modules of Python: "
        "take the class of the same name in attnpack (from_cpp() gives the module)");
  }
};

}  // namespace

void register_context_parallel(py::module_& m) {
  m.def(
      "set_active",
      [](bool active) {
        static const PythonContextParallel over;
        set_sharded_attention(active ? &over : nullptr);
      },
      "Whether this thread's sequences are sharded from now on.");
}

}  // namespace attnpack
