"""Do the programs in the README run?"""

import re

import pytest

from tests.launch import ROOT, mpirun


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_examples_run(ranks, tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    program = tmp_path / "program.py"
    program.write_text(
        f"{code}\nassert torch.equal(y, torch.ones(1, 1024)) and counts == list(range(world.size))\n"
        "assert len(rows) == sum(counts)\n"
    )
    done = mpirun(ranks, "-m", "mpi4py", str(program))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "range(0," in done.stdout
    assert ("nothing: a group of one" if ranks == 1 else "AUTO: 1 x 4096 bytes of fp32 on 3 ranks") in done.stdout
