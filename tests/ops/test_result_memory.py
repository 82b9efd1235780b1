"""Memory of small results, which ops take from results before them: each has its own, as long as it lives."""

import gc
import pickle
import threading

import pytest
import torch
from attnpack import ops

SIZES = (1, 3, 63, 64, 65, 1000, 8176, 8177, 9000)  # the largest block holds 8176 floats


def result(size, value):
    """A tensor of `size` numbers near `value`, which swiglu has made."""
    return ops.swiglu(torch.full((size,), 100.0), torch.full((size,), value / 100.0))


def holds(tensor, value):
    return torch.allclose(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize("size", SIZES)
def test_results_that_live_keep_their_numbers(size):
    alive = [result(size, float(i)) for i in range(40)]
    assert len({t.data_ptr() for t in alive}) == 40 and all(t.data_ptr() % 64 == 0 for t in alive)
    del alive[::2]
    more = [result(size, -1.0) for _ in range(60)]
    assert all(holds(t, 2.0 * i + 1) for i, t in enumerate(alive)) and all(holds(t, -1.0) for t in more)


def test_views_arrays_and_copies_outlive_the_result():
    y = result(100, 7.0)
    view, array, packed = y[3:], y.numpy(), pickle.dumps(y)
    shared = result(100, 8.0).share_memory_()
    larger = result(100, 9.0).resize_(5000)
    del y
    gc.collect()
    for _ in range(40):
        result(100, -1.0)
    assert holds(view, 7.0) and (array == array[0]).all() and abs(array[0] - 7) < 1e-5
    assert holds(pickle.loads(packed), 7.0) and holds(shared, 8.0) and holds(larger[:100], 9.0)


def test_memory_may_end_in_another_thread():
    handed, errors = [], []

    def make_and_drop(begin):
        own = [result(200, float(begin + i)) for i in range(30)]
        handed.append(own[0])
        for i, t in enumerate(own):
            if not holds(t, float(begin + i)):
                errors.append(begin + i)

    threads = [threading.Thread(target=make_and_drop, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and sorted(round(t[0].item()) for t in handed) == [100 * n for n in range(8)]
    handed.clear()
    assert holds(result(200, 3.0), 3.0)


def test_the_profiler_counts_it():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = result(1000, 1.0)
    made = [event for event in profile.key_averages() if event.key == "attnpack::swiglu"]
    assert made[0].cpu_memory_usage >= 4000 and kept.numel() == 1000
