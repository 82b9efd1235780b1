"""In-tree PEP 517 backend: setuptools, building against the torch that the user already has.

pip builds in an environment of its own, which hides the user's packages. Listing torch as a build requirement would
download gigabytes and might pick another torch than the one that runs; so this backend asks the interpreter, as the
user would start it, where its torch is. setup.py asks the same function.

With ATTNPACK_WHEEL_TORCHES, such as "2.13.0 2.14.1", a wheel is that of scripts/wheel.sh for these releases: so
cibuildwheel makes it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the hooks that need no torch)

NO_TORCH = (
    "attnpack: there is no torch in this environment; install one (pip install torch, version 2.11 or newer) and try "
    "again: attnpack is built against the torch that you use. With uv, add --no-build-isolation."
)
WHEEL_TORCHES = "ATTNPACK_WHEEL_TORCHES"
_FIND = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"


def find_torch() -> str:
    """Folder of the torch to build against: that of ATTNPACK_TORCH_DIR, else the one seen from here or from outside
    pip's build environment; exits if there is none."""
    if given := os.environ.get("ATTNPACK_TORCH_DIR"):
        return given
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    for environment in (None, outside):
        found = subprocess.run([sys.executable, "-c", _FIND], env=environment, text=True, stdout=subprocess.PIPE)
        if found.stdout.strip():
            return found.stdout.strip()
    sys.exit(NO_TORCH)


def has_cmake() -> bool:
    """Whether the PATH holds a cmake that is new enough for CMakeLists.txt."""
    if shutil.which("cmake") is None:
        return False
    printed = subprocess.run(["cmake", "--version"], text=True, stdout=subprocess.PIPE).stdout
    return tuple(map(int, re.search(r"(\d+)\.(\d+)", printed).groups())) >= (3, 22)


def get_requires_for_build_wheel(config_settings=None):
    if not os.environ.get(WHEEL_TORCHES):
        find_torch()  # says so now, before anything is downloaded or compiled
    tools = ([] if has_cmake() else ["cmake"]) + ([] if shutil.which("ninja") else ["ninja"])
    return build_meta.get_requires_for_build_wheel(config_settings) + tools


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    releases = os.environ.pop(WHEEL_TORCHES, "").split()  # the script builds each of them by this function
    if not releases:
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    here = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": path}
    subprocess.run(["bash", "scripts/wheel.sh", *releases], check=True, env=here)
    (wheel,) = Path("dist").glob("attnpack-*.whl")
    return Path(shutil.copy(wheel, wheel_directory)).name
