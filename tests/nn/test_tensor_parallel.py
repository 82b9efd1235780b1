"""Tensor parallelism by torch's own plan: two processes give the numbers of one, or an error in one sentence."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = [
    "multi-head",
    "grouped",
    "grouped, compiled",
    "grouped, steps",
    "norms without gradients",
    "latent",
    "latent, steps",
    "latent without rotated dims",
    "model",
    "mask for all heads",
]
REFUSED = {
    "one kv head": "give widths 12, 3, 3, want num_heads 4 and num_kv_heads 1 of head_dim 6",
    "queries alone": "give widths 12, 12, 12, want num_heads 4 and num_kv_heads 2",
    "one head": "give widths 12, 12, 12, want num_heads 1 and num_kv_heads 1 of head_dim 24",
    "mask by head": r"mask has shape \[1, 4, 7, 7\], one for each of num_heads 4 heads, but the projections give 2",
    "latent, mask by head": r"mask has shape \[1, 4, 7, 7\], one for each of num_heads 4 heads, but .* a rank's share",
    "sinks": "sinks: got it for 4 heads, but the projections give 2",
    "alibi": "alibi: got it for 4 heads, but the projections give 2",
    "head map": "head_map: got it for 4 heads, but the projections give 2",
    "norms": "q_norm.weight: its gradient would be that of only this rank's heads",
    "latent with gradients": "kv_a_proj_with_mqa.weight: its gradient would be that of only this rank's heads",
    "latent, queries alone": r"kv_b has shape \[36, 10\]",
    "latent, latents alone": "kv_b_proj gives width 18, want 4 heads of 9 dims",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """For each rank and case: the distance from the result of one process, or the error."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    program = Path(__file__).parents[1] / "support/tensor_parallel_rank.py"
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), store], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text) for text in printed]


@pytest.mark.parametrize("case", RIGHT)
def test_shares_give_the_numbers_of_one_process(outcomes, case):
    for rank in outcomes:
        assert isinstance(rank[case], float) and rank[case] < 1e-5, rank[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused(outcomes, case):
    for rank in outcomes:
        assert re.match(f"ValueError: attnpack: .*{REFUSED[case]}", str(rank[case])), rank[case]
