"""Does a command of one process end with the right exit code and one line?"""

import pytest

from spmd import errors
from spmd.control.job import Options, debug_level, launched_rank, run, start, together
from spmd.errors import (
    DeadlineError,
    DesyncError,
    InputError,
    LostRankError,
    OutOfStepError,
    SerializationError,
    SpmdError,
    VerifyError,
)

CODES = {
    SpmdError: 1,
    InputError: 2,
    OutOfStepError: 3,
    DesyncError: 3,
    DeadlineError: 3,
    LostRankError: 3,
    VerifyError: 4,
    SerializationError: 1,
}
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for variable in (*RANK_VARIABLES, "SPMD_DEBUG"):
        monkeypatch.delenv(variable, raising=False)


def ended(main):
    with pytest.raises(SystemExit) as caught:
        run(main)
    return caught.value.code


def throw(error):
    raise error


def test_every_error_type_has_its_exit_code():
    public = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert public == CODES.keys()
    assert {kind: kind.exit_code for kind in CODES} == CODES
    assert issubclass(InputError, ValueError)
    assert issubclass(DeadlineError, TimeoutError)
    assert all(issubclass(kind, SpmdError) for kind in CODES)


@pytest.mark.parametrize("kind", CODES)
def test_run_prints_one_line_and_leaves_with_the_code(kind, capfd):
    assert ended(lambda: throw(kind("layer 3: 7 rows, expected 8"))) == CODES[kind]
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("spmd: ")
    assert err.endswith("layer 3: 7 rows, expected 8\n")


def test_run_leaves_with_0(capfd):
    assert ended(lambda: None) == 0
    assert capfd.readouterr() == ("", "")


def test_run_keeps_an_exit_code(capfd):
    assert ended(lambda: throw(SystemExit(7))) == 7
    assert ended(lambda: throw(KeyboardInterrupt())) == 130
    assert "Traceback" not in capfd.readouterr().err


def test_run_shows_the_traceback_of_other_exceptions(capfd):
    assert ended(lambda: throw(ZeroDivisionError("seven"))) == 1
    err = capfd.readouterr().err
    assert err.startswith("spmd: ")
    assert "Traceback" in err
    assert err.endswith("ZeroDivisionError: seven\n")


def test_debug_shows_the_traceback_of_our_errors(monkeypatch, capfd):
    monkeypatch.setenv("SPMD_DEBUG", "1")
    assert ended(lambda: throw(InputError("no such layer"))) == 2
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.endswith("spmd: no such layer\n")


@pytest.mark.parametrize("text,level", [("0", 0), ("1", 1), ("4", 4), ("", 0), ("yes", 0)])
def test_debug_level(monkeypatch, text, level):
    monkeypatch.setenv("SPMD_DEBUG", text)
    assert debug_level() == level


def test_together_in_one_process_changes_no_error():
    error = InputError("row 3 is missing")
    with pytest.raises(InputError) as caught, together(None):
        raise error
    assert caught.value is error
    with pytest.raises(KeyError), together(None):
        raise KeyError("not ours")
    with together(None):
        reached = True
    assert reached


def test_options_turn_errors_into_input_errors(capfd):
    options = Options(prog="spmd-try")
    options.add_argument("--tp", type=int)
    assert options.parse_args(["--tp", "2"]).tp == 2
    for words in (["--tp", "two"], ["--tq", "2"], ["--tp"]):
        with pytest.raises(InputError, match=r"^[^\n]+ \(see spmd-try --help\)$"):
            options.parse_args(words)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_help_is_printed_by_the_first_rank(monkeypatch, capfd, variable):
    options = Options(prog="spmd-try")
    assert (launched_rank(), start()) == (0, None)
    for rank in (0, 3):
        monkeypatch.setenv(variable, str(rank))
        assert launched_rank() == rank
        with pytest.raises(SystemExit) as caught:
            options.parse_args(["--help"])
        assert caught.value.code == 0
        assert ("usage: spmd-try" in capfd.readouterr().out) == (rank == 0)
