"""The gated delta rule of ggml, the library of llama.cpp, on tensors of torch.

`Ggml(folder)` opens libggml-base and libggml-cpu there, as a build of llama.cpp (or of llama-cpp-python from 0.3.30
on, in llama_cpp/lib) leaves them. Not copied: ggml's C interface is called with ctypes.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_bool, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

_F32 = 0  # GGML_TYPE_F32


class _Memory(Structure):  # ggml_init_params
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Plan(Structure):  # ggml_cplan; what comes after work_data stays as ggml_graph_plan gave it
    _fields_ = (("work_size", c_size_t), ("work_data", c_void_p), ("rest", ctypes.c_byte * 64))


class Ggml:
    def __init__(self, folder: Path) -> None:
        self._base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        if not hasattr(self._base, "ggml_gated_delta_net"):
            raise ValueError(f"{folder}: its ggml has no gated delta rule; take llama.cpp of 2026")
        self._cpu.ggml_cpu_init()

    def _call(self, library: ctypes.CDLL, name: str, result: type, *values: object) -> object:
        function = getattr(library, name)
        function.restype = result
        return function(*values)

    def _tensor(self, context: c_void_p, rows: torch.Tensor) -> c_void_p:
        """A tensor of ggml with the numbers of rows, whose sizes ggml counts from the last to the first."""
        rows = rows.contiguous()
        sizes = [c_int64(size) for size in (*reversed(rows.shape), 1, 1, 1)[:4]]
        made = c_void_p(self._call(self._base, "ggml_new_tensor_4d", c_void_p, context, c_int(_F32), *sizes))
        ctypes.memmove(self._data(made), rows.data_ptr(), rows.nbytes)
        return made

    def _data(self, tensor: c_void_p) -> int:
        return self._call(self._base, "ggml_get_data", c_void_p, tensor)

    def delta_rule(self, x: dict[str, torch.Tensor], state: torch.Tensor, threads: int):
        """A function that computes x (query, key, value [B, H, L, D], log_decay, beta; fp32) from state [B, H, D, D],
        and returns the outputs [B, H, L, D] and the states after them, which are views of ggml's memory."""
        batch, heads, length, width = x["value"].shape
        inputs = [x[name].transpose(1, 2) for name in ("query", "key", "value", "log_decay", "beta")]
        inputs[3:] = [t if t.dim() == 4 else t.unsqueeze(-1) for t in inputs[3:]]
        inputs.append(state.mT)  # ggml holds states by columns
        numbers = sum(t.numel() for t in inputs) + batch * heads * width * (length + width)
        memory = _Memory(4 * numbers + 2**20, None, False)
        context = c_void_p(self._call(self._base, "ggml_init", c_void_p, memory))
        tensors = [self._tensor(context, t) for t in inputs]
        result = c_void_p(
            self._call(
                self._base, "ggml_gated_delta_net", c_void_p, context, *tensors, c_int64(1)
            )  # one state: the last
        )
        graph = c_void_p(self._call(self._base, "ggml_new_graph", c_void_p, context))
        self._call(self._base, "ggml_build_forward_expand", None, graph, result)
        plan = self._call(self._cpu, "ggml_graph_plan", _Plan, graph, c_int(threads), None)
        work = ctypes.create_string_buffer(plan.work_size + 1)
        outputs = batch * length * heads * width
        found = (ctypes.c_float * (outputs + state.numel())).from_address(self._data(result))
        rows = torch.frombuffer(found, dtype=torch.float32)
        out = rows[:outputs].view(batch, length, heads, width).transpose(1, 2)
        after = rows[outputs:].view(batch, heads, width, width).mT
        self._cpu.ggml_graph_compute.argtypes = (c_void_p, POINTER(_Plan))

        def run():
            plan.work_data = ctypes.addressof(work)  # which lives as long as this function
            if self._cpu.ggml_graph_compute(graph, byref(plan)) != 0:
                raise RuntimeError("ggml_graph_compute failed")
            return out, after

        return run
