"""scripts/wheel.sh for the torch of this environment, and its wheel in an environment away from the sources."""

import sysconfig
import venv
import zipfile

import pytest
from processes import ROOT, run_program

RUN = """
import attnpack, torch
layer = attnpack.GroupedQueryAttention(24, 4, 2, causal=True)
x = torch.randn(2, 5, 24)
cache = attnpack.DynamicCache()
with torch.no_grad():
    steps = torch.cat([layer(token, cache=cache) for token in x.split(1, 1)], 1)
torch.testing.assert_close(steps, layer(x), rtol=1e-5, atol=1e-5)
print(attnpack.__file__)
"""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_wheel_script_makes_a_wheel_that_runs_elsewhere(tmp_path):
    made = run_program("bash", ROOT / "scripts/wheel.sh", timeout=3500)
    assert made.returncode == 0, made.text
    (wheel,) = (ROOT / "dist").glob("attnpack-*.whl")
    assert "manylinux_2_28" in wheel.name or "manylinux_2_34" in wheel.name
    assert zipfile.ZipFile(wheel).testzip() is None
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # The wheel stands beside no torch: the loader finds the libraries that torch has loaded.
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ran = run_program(tmp_path / "venv/bin/python", "-c", RUN, cwd=tmp_path, env={})
    assert ran.returncode == 0 and ran.stdout.strip() == str(site / "attnpack/__init__.py"), ran.text
