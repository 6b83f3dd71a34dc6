"""Do the shared-memory protocols keep what their models claim in every interleaving, and is every seeded fault found?

Each model under kernels/cpu/protocol is turned into its verifier by spin, which visits every state that can be reached.
"""

import re
import subprocess
from pathlib import Path

import pytest

PROTOCOLS = Path(__file__).parents[2] / "kernels" / "cpu" / "protocol"
FAULTS = [("lamport", 4), ("passes", 5), ("symmetric", 4)]


def run(folder, *command):
    """The output of a program that must succeed, run in `folder`; a missing program fails the test by its name."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        name = command[0]
        pytest.fail(f"{name} is missing: install the package {name} (apt-get install {name})", pytrace=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def verify(folder, model, **defines):
    """The report of the verifier on a model under these definitions: "errors: 0", or the first error found."""
    definitions = [f"-D{name}={value}" for name, value in defines.items()]
    run(folder, "spin", "-a", *definitions, str(PROTOCOLS / f"{model}.pml"))
    run(folder, "gcc", "-w", "-O1", "-DSAFETY", "-DMEMLIM=2048", "-o", "pan", "pan.c")
    return run(folder, "./pan", "-m3000000")


def assert_holds(report):
    """Nothing wrong in any state; the search was exhaustive and exact, and every statement of the model took part."""
    assert "errors: 0" in report, report
    assert "Full statespace search" in report, report
    assert not re.search("search depth|not completed|hash-compact", report, re.IGNORECASE), report
    assert re.search(r"assertion violations\s+\+", report) and re.search(r"invalid end states\s+\+", report), report
    assert int(re.search(r"(\d+) states, stored", report)[1]) > 1000, report
    assert re.findall(r'state \d+, "(.*)"', report) == ["-end-"], report


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", [model for model, _ in FAULTS])
def test_claim_holds(model, ranks, tmp_path):
    assert_holds(verify(tmp_path, model, RANKS=ranks))


@pytest.mark.parametrize(("model", "fault"), [(model, 1 + i) for model, count in FAULTS for i in range(count)])
def test_fault_is_found(model, fault, tmp_path):
    report = verify(tmp_path, model, FAULT=fault)
    found = "invalid end state (" if (model, fault) == ("symmetric", 4) else "assertion violated ("
    assert "errors: 1" in report and found in report, report


@pytest.mark.parametrize("lookahead", [0, 2])
def test_slots_needed(lookahead, tmp_path):
    """Two more than twice the passes copied ahead, neither more nor less; test_claim_holds has the case of one."""
    needed = 2 * lookahead + 2
    assert_holds(verify(tmp_path, "passes", SLOTS=needed, LOOKAHEAD=lookahead))
    report = verify(tmp_path, "passes", SLOTS=needed - 1, LOOKAHEAD=lookahead)
    assert "errors: 1" in report and "assertion violated (slots" in report, report
