"""Tokens per second of a Qwen3.5-shaped model with random weights in transformers, before and after
`attnpack.hf.register()`, and of the same model as an attnpack.CausalLM.

Three layers of four are GatedDeltaNets. The three ways are timed in turn, on the same weights and prompt; the least
time of the rounds counts. "prefill" reads the prompt, "decode" makes new tokens from one token, "training" is a forward
and backward pass over the prompt.
"""

import argparse
import tempfile
import time
import warnings

import attnpack
import attnpack.hf
import torch
from attnpack.tools.bench import conditions
from packed import DTYPES
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.utils import logging


def make_peer(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    heads = args.hidden // 64
    config = Qwen3_5TextConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=max(heads // 2, 1), num_key_value_heads=max(heads // 8, 1),
        head_dim=128, linear_num_key_heads=heads // 2, linear_num_value_heads=heads // 2, linear_key_head_dim=128,
        linear_value_head_dim=128, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def train(model: torch.nn.Module, ids: torch.Tensor) -> None:
    out = model(ids)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=32, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    return parser.parse_args()


def main() -> None:
    args = parse()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    print(conditions(args.dtype))
    peer = make_peer(args)
    with tempfile.TemporaryDirectory() as directory:
        peer.save_pretrained(directory)
        ours = attnpack.CausalLM.from_hf(directory, dtype=DTYPES[args.dtype])
    peer.to(DTYPES[args.dtype])
    ids = torch.randint(args.vocab, (1, args.prompt))

    def generate(model) -> None:
        options = {} if isinstance(model, attnpack.CausalLM) else {"do_sample": False}
        model.generate(ids[:, :1], max_new_tokens=args.new, **options)

    ways = {
        "transformers": (peer, False),
        "transformers after register()": (peer, True),
        "attnpack.CausalLM": (ours, True),
    }
    best: dict[tuple[str, str], float] = {}
    for _ in range(args.rounds + 1):  # the first warms up
        for name, (model, registered) in ways.items():
            attnpack.hf.register() if registered else attnpack.hf.unregister()
            with torch.no_grad():
                prefill = seconds(lambda model=model: model(ids))
                decode = seconds(lambda model=model: generate(model))
            training = seconds(lambda model=model: train(model, ids))
            model.zero_grad()
            for kind, spent in (("prefill", prefill), ("decode", decode), ("training", training)):
                best[name, kind] = min(best.get((name, kind), float("inf")), spent)
    attnpack.hf.unregister()
    tokens = {"prefill": args.prompt, "decode": args.new, "training": args.prompt}
    size = sum(p.numel() for p in peer.parameters()) / 1e6
    print(
        f"{size:.0f}M parameters, {args.layers} layers, {args.dtype}, {torch.get_num_threads()} threads; tokens "
        "per second"
    )
    print(f"{'':32}" + "".join(f"{kind:>16}" for kind in tokens))
    for name in ways:
        rates = {kind: count / best[name, kind] for kind, count in tokens.items()}
        times = {kind: best["transformers", kind] / best[name, kind] for kind in tokens}
        print(f"{name:32}" + "".join(f"{rates[kind]:9,.0f} ({times[kind]:.1f}x)" for kind in tokens))


if __name__ == "__main__":
    main()
