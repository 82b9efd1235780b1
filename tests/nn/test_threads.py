"""Eight Python threads use modules at once: shared ones without state, and caches, twins and models of their own. Each
gets bitwise the result of one thread. Where Python has no GIL, importing attnpack leaves it off."""

import sys
import sysconfig

import attnpack
import pytest
import torch
from threads import THREADS, in_threads

ROUNDS = 10
CASES = {
    "grouped": lambda: attnpack.GroupedQueryAttention(24, 4, 2, causal=True, qk_norm=True),
    "latent": lambda: attnpack.MultiHeadLatentAttention(
        24, 2, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6, causal=True
    ),
    "block": lambda: attnpack.DecoderBlock(
        attnpack.MultiHeadAttention(24, 4, causal=True), attnpack.FeedForward(24, 32)
    ),
    "recurrent": lambda: attnpack.GatedDeltaNet(24, 2, 4, head_k_dim=8, head_v_dim=6),
}


def test_importing_leaves_the_gil_off():
    assert attnpack._C is not None
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled()


def inputs(number: int) -> torch.Tensor:
    return torch.randn(2, 5 + number, 24, generator=torch.Generator().manual_seed(number))


def gradients(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("case", CASES)
def test_one_module_in_eight_threads(case):
    torch.manual_seed(0)
    module = CASES[case]()
    wanted = [gradients(module, inputs(n)) for n in range(THREADS)]

    def work(number):
        for _ in range(ROUNDS):
            found = gradients(module, inputs(number))
            assert all(map(torch.equal, found, wanted[number]))

    in_threads(work)


@pytest.mark.parametrize("case", CASES)
def test_modules_are_made_in_eight_threads(case):
    """Constructors ask the C++ module for its children; `cpp()` shares the parameters."""
    torch.manual_seed(0)
    state = CASES[case]().state_dict()
    with torch.no_grad():
        first = CASES[case]()
        first.load_state_dict(state)
        wanted = first(inputs(0))

    @torch.no_grad()
    def work(number):
        for _ in range(ROUNDS):
            module = CASES[case]()
            module.load_state_dict(state)
            assert torch.equal(module(inputs(0)), wanted) and torch.equal(module.cpp()(inputs(0)), wanted)

    in_threads(work)


@pytest.mark.parametrize("cache", ["dynamic", "static", "int8", "paged"])
def test_one_model_generates_in_eight_threads(cache):
    torch.manual_seed(0)
    model = attnpack.CausalLM(50, 24, 2, 4, 2, hidden_dim=32).eval()
    prompts = [torch.randint(50, (1, 3 + n)) for n in range(THREADS)]
    wanted = [model.generate(prompt, max_new_tokens=5, cache=cache) for prompt in prompts]

    def work(number):
        for _ in range(ROUNDS):
            assert torch.equal(model.generate(prompts[number], max_new_tokens=5, cache=cache), wanted[number])

    in_threads(work)


def test_each_thread_has_a_cache():
    torch.manual_seed(0)
    layer = attnpack.GroupedQueryAttention(24, 4, 2, causal=True)
    wanted = [layer(inputs(n)) for n in range(THREADS)]

    @torch.no_grad()
    def work(number):
        for _ in range(ROUNDS):
            cache = attnpack.DynamicCache()
            steps = torch.cat([layer(token, cache=cache) for token in inputs(number).split(1, 1)], 1)
            torch.testing.assert_close(steps, wanted[number], rtol=1e-5, atol=1e-5)

    in_threads(work)
