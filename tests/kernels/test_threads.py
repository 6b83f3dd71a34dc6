"""Are the collectives free of data races? The same kernels with ranks as threads, under ThreadSanitizer.

x86 keeps stores and loads in order, so a missing release or acquire goes unseen between processes; the checker sees it.
"""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++20", "-O1", "-g", "-fno-strict-aliasing", "-Wno-psabi", "-ffp-contract=off", f"-I{ROOT}/kernels"]
# every Lamport word an atomic of its own: as a checker, and a machine with weaker order than x86, needs it
FLAGS += ["-DSPMD_ISA=baseline", "-DSPMD_ATOMIC_WORDS", "-fsanitize=thread"]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")

    def compiled(source: Path, *defines: str) -> str:
        target = folder / f"{source.stem}{''.join(defines)}.o"
        if not target.exists():
            subprocess.run(["g++", *FLAGS, *defines, "-c", source, "-o", target], check=True, timeout=300)
        return str(target)

    def program(*defines: str) -> Path:
        parts = [compiled(ROOT / "kernels/cpu/data.cpp"), compiled(ROOT / "kernels/cpu/plane.cpp", *defines)]
        parts.append(compiled(Path(__file__).with_name("plane_threads.cpp")))
        made = folder / ("plane" + "".join(defines))
        subprocess.run(["g++", "-fsanitize=thread", *parts, "-o", made], check=True, timeout=300)
        return made

    return program


def run(program: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_no_race_and_the_right_sums(build, ranks):
    done = run(build(), ranks, 1000 // ranks, ranks)
    assert "ThreadSanitizer" not in done.stderr, done.stderr[:3000]
    assert (done.returncode, done.stdout) == (0, f"{ranks} ranks, {1000 // ranks} calls, wrong 0\n"), done.stdout


def test_flags_that_do_not_release_are_reported(build):
    done = run(build("-DSPMD_FAULT_RELAXED"), 2, 50, 1)
    assert "ThreadSanitizer: data race" in done.stderr
