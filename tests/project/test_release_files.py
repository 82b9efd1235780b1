"""Files of a release: workflows call scripts that are here, and the conda recipe asks for what pyproject.toml asks for.
The archive for C++ is tested with the wheel, in test_packaging.py."""

import json
import re
import tomllib

import pytest
import yaml
from processes import ROOT, run_program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def scripts_of(workflow) -> list[str]:
    """The commands of its steps."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_steps_of_workflows_are_scripts_of_ours(workflow):
    commands = scripts_of(workflow)
    called = [name for command in commands for name in re.findall(r"bash (scripts/\w+\.sh|\.ci/run)", command)]
    assert called
    for name in called:
        checked = run_program("bash", "-n", ROOT / name)
        assert checked.returncode == 0, checked.text
    known = re.compile(
        r"bash (scripts/|\.ci/run)|.* bash scripts/|sudo apt-get update|echo .*GITHUB_PATH|bash -c 'source"
    )
    assert [text for text in commands if not known.match(text)] == []


def test_released_wheels_have_the_newest_of_the_tested_torches():
    """Torch 2.11 runs on a build from source."""
    from attnpack.extras import TESTED

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert tuple(settings["environment"]["ATTNPACK_WHEEL_TORCHES"].split()) == TESTED["torch"][1:]
    for system in settings["overrides"]:  # no system has other releases
        assert system["inherit"]["environment"] == "append" and "ATTNPACK_WHEEL_TORCHES" not in system["environment"]


def test_the_conda_recipe_asks_for_what_the_project_asks_for():
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    needs = recipe["requirements"]
    (torch,) = PROJECT["dependencies"]
    assert torch.replace("torch", "pytorch ") in needs["host"] and any("pytorch" in name for name in needs["run"])
    assert f"python {PROJECT['requires-python']}" in needs["run"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {name.split(">=")[0].replace("-", "_") for name in build} <= {each.split()[0] for each in needs["host"]}
    assert recipe["about"]["license"] == PROJECT["license"] and recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license_file"] == PROJECT["license-files"]
    assert all((ROOT / file).is_file() for file in PROJECT["license-files"])
    assert "ATTNPACK_VERSION" in recipe["package"]["version"]


@pytest.mark.long
def test_the_conda_recipe_is_one_that_rattler_build_takes():
    """It evaluates the recipe with its variants: a package per Python, for a torch of the minor it was built with."""
    rendered = run_program("bash", ROOT / "scripts/conda.sh", "--render-only")
    assert rendered.returncode == 0, rendered.text
    packages = json.loads(rendered.stdout[rendered.stdout.index("[") :])
    versions = [each["build_configuration"]["variant"]["python"] for each in packages]
    assert versions == [f"3.{minor}.*" for minor in range(11, 15)]
    for each in packages:
        pins = [need["pin_compatible"] for need in each["recipe"]["requirements"]["run"] if "pin_compatible" in need]
        assert pins == [{"name": "pytorch", "lower_bound": "x.x", "upper_bound": "x.x"}]
