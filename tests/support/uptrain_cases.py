"""A tiny converted checkpoint, and the command line that trains it."""

from pathlib import Path

import torch
from attnpack.tools import cli
from hf_checkpoints import MHA, random_model, write_tokenizer
from transformers import LlamaConfig


def check_it_goes_on(work, steps: int) -> None:
    """So many steps give the same, bit by bit, as one step less, a save, a load, and one more step."""
    whole, first, second = work(), work(), work()
    for step in range(steps):
        for part in [whole] + ([first] if step < steps - 1 else []):
            part.train_step()
            part.spent = float(step + 1)
    second.load_state(first.state())
    second.train_step()
    assert second.losses == whole.losses
    for name, parameter in whole.trained.items():
        assert torch.equal(parameter, second.trained[name]), name


def written_by(model, length=6000) -> str:
    """A text that is likely for the model: drawn from it, 60 tokens at a time, from the printable tokens."""
    rows = torch.randint(90, (length // 60, 1), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(59):
            likely = model(rows).logits[:, -1, :90].softmax(-1)
            rows = torch.cat([rows, torch.multinomial(likely, 1, generator=generator)], 1)
    return "".join(chr(33 + token) for token in rows.flatten().tolist())


def write_tiny(folder: Path, config) -> None:
    """folder/in, a tiny model whose outputs are certain, in several files, and folder/text.txt."""
    model = random_model(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(folder / "in", max_shard_size="60KB")
    write_tokenizer(folder / "in")
    (folder / "text.txt").write_text(written_by(model))


def convert_tiny(folder: Path) -> Path:
    """folder/out, a tiny model converted to one kv head by the mean. The original and the text are in folder."""
    write_tiny(folder, LlamaConfig(**MHA))
    assert cli.main(["convert", str(folder / "in"), str(folder / "out"), "--kv-heads", "1", "--method", "mean"]) == 0
    return folder / "out"


def convert_tiny_to_mla(folder: Path, config) -> Path:
    """The same with latent attention, which holds a third of the numbers."""
    write_tiny(folder, config)
    text = str(folder / "text.txt")
    sizes = ["--kv-lora-rank", "9", "--rope-dim", "4", "--text", text, "--tokens", "400"]
    assert cli.main(["convert", str(folder / "in"), str(folder / "out"), *sizes]) == 0
    return folder / "out"


def arguments(directory, *more) -> list[str]:
    text = directory.parent / "text.txt"
    return ["uptrain", str(directory), "--text", str(text), "--minutes", "0.05", "--length", "64", *map(str, more)]
