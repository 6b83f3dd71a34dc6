"""Is a launcher that does not fit its MPI library found out, and is a bad SPMD_TIMEOUT refused?"""

import sys
from itertools import product
from pathlib import Path

import pytest

from spmd.control.agree import checking, default_timeout
from spmd.control.mpi import check_launcher
from spmd.errors import InputError

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ...\nMPICH ABI:          18:2:6\0"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11, repo rev: v5.0.11, 2026\0"
BY_MPICH = {"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "7"}
BY_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    "environment,launcher,library,loaded",
    [
        (BY_MPICH, "MPICH", OPEN_MPI, "Open MPI v5.0.11"),
        (BY_OPEN_MPI, "Open MPI", MPICH, "MPICH Version:      5.0.2"),
        (BY_MPICH, "MPICH", MPICH, "MPICH Version:      5.0.2"),  # two installations of one library
        (BY_OPEN_MPI, "Open MPI", OPEN_MPI, "Open MPI v5.0.11"),
    ],
)
def test_singletons_under_a_launcher_of_several_are_found(environment, launcher, library, loaded):
    with pytest.raises(InputError) as caught:
        check_launcher(environment, 1, library)
    text = str(caught.value)
    assert text.startswith(f"4 ranks were launched by {launcher}'s mpirun, but mpi4py loaded {loaded} and sees 1: ")
    assert f"use {Path(sys.executable).parent}/mpirun" in text
    assert text.isprintable()


@pytest.mark.parametrize("library", [MPICH, OPEN_MPI])
def test_what_fits_passes(library):
    check_launcher({}, 1, library)
    for environment, size in product((BY_MPICH, BY_OPEN_MPI), (2, 4)):
        check_launcher(environment, size, library)
    for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        check_launcher({variable: "1"}, 1, library)
        check_launcher({variable: ""}, 1, library)
        check_launcher({variable: "many"}, 1, library)


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "nan", "5 s"])
def test_a_bad_timeout_is_an_input_error(monkeypatch, text):
    monkeypatch.setenv("SPMD_TIMEOUT", text)
    with pytest.raises(InputError) as caught:
        default_timeout()
    assert str(caught.value) == f"SPMD_TIMEOUT must be a number of seconds above 0, but is {text!r}"


def test_the_timeout_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("SPMD_TIMEOUT", "2.5")
    assert default_timeout() == 2.5
    monkeypatch.delenv("SPMD_TIMEOUT")
    assert default_timeout() == 300.0


@pytest.mark.parametrize("text,expected", [("1", True), ("0", False), ("", False), (None, False)])
def test_checking_is_asked_for(monkeypatch, text, expected):
    monkeypatch.delenv("SPMD_CHECK")
    if text is not None:
        monkeypatch.setenv("SPMD_CHECK", text)
    assert checking() is expected
