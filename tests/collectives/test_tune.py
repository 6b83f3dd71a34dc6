"""Does the tuned table's file survive everything, and is it somebody else's machine or version's that is left alone?"""

import json
import logging
import os
from threading import Thread

import pytest

from spmd.collectives import tune
from spmd.collectives.strategy import Way

WAYS = {"4 bf16 2^13 NONE ordinary": "one-shot", "4 bf16 2^14 NONE symmetric": "two-shot"}
OTHER = {"2 fp32 2^3 NONE ordinary": "lamport"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPMD_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.DEBUG, "spmd")
    return tmp_path / "cache" / "allreduce.json"


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_no_file_is_no_table_and_no_word(cache, caplog):
    assert tune.path() == cache
    assert tune.read() == {}
    assert not lines(caplog) and not cache.parent.exists()


def test_what_is_written_is_read(cache, caplog):
    tune.write(WAYS)
    assert tune.read() == WAYS
    tune.write(OTHER)
    assert tune.read() == OTHER
    assert os.listdir(cache.parent) == [cache.name]
    assert not lines(caplog)
    stored = json.loads(cache.read_text())
    assert isinstance(stored["version"], int) and stored["machines"] == {tune.machine(): OTHER}


def test_each_machine_has_its_own(monkeypatch):
    tune.write(WAYS)
    name = tune.machine()
    assert name == tune.machine() and name and "\n" not in name
    monkeypatch.setattr(tune, "machine", lambda: "another")
    assert tune.read() == {}
    tune.write(OTHER)
    assert tune.read() == OTHER
    monkeypatch.setattr(tune, "machine", lambda: name)
    assert tune.read() == WAYS


def edit(**changes):
    def corrupt(cache):
        cache.write_text(json.dumps(json.loads(cache.read_text()) | changes))

    return corrupt


CORRUPT = {
    "empty": lambda cache: cache.write_text(""),
    "cut": lambda cache: cache.write_text(cache.read_text()[:-20]),
    "binary": lambda cache: cache.write_bytes(bytes(range(256))),
    "several lines": lambda cache: cache.write_text("no\nJSON\n"),
    "a list": lambda cache: cache.write_text("[1, 2]"),
    "null": lambda cache: cache.write_text("null"),
    "nothing in it": lambda cache: cache.write_text("{}"),
    "deep": lambda cache: cache.write_text("[" * 100_000),
    "another version": edit(version=-1),
    "a version in words": edit(version="new"),
    "no machines": edit(machines=None),
    "a list of machines": edit(machines=[1]),
    "a word for a machine": edit(machines={tune.machine(): "fast"}),
    "a way that is none": edit(machines={tune.machine(): {"4 bf16 2^13 NONE ordinary": "magic"}}),
    "a number for a way": edit(machines={tune.machine(): {"4 bf16 2^13 NONE ordinary": 3}}),
    "a folder": lambda cache: (cache.unlink(), cache.mkdir()),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_ignored_with_one_line_and_made_anew(cache, caplog, name):
    tune.write(WAYS)
    CORRUPT[name](cache)
    assert tune.read() == {}
    (line,) = lines(caplog)
    assert str(cache) in line and "\n" not in line
    caplog.clear()
    tune.write(OTHER)  # over a folder it cannot be written, which is one line as well
    if cache.is_dir():
        assert len(lines(caplog)) == 1
    else:
        assert tune.read() == OTHER and not lines(caplog)
    assert os.listdir(cache.parent) == [cache.name]


def fail(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", ["os.replace", "os.fsync", "json.dump"])
def test_a_write_that_fails_leaves_the_old_file_alone(cache, caplog, monkeypatch, broken):
    tune.write(WAYS)
    monkeypatch.setattr(broken, fail)
    tune.write(OTHER)
    monkeypatch.undo()
    monkeypatch.setenv("SPMD_CACHE_DIR", str(cache.parent))
    (line,) = lines(caplog)
    assert "No space left" in line and "\n" not in line
    assert tune.read() == WAYS
    assert os.listdir(cache.parent) == [cache.name]  # and nothing beside it


def test_a_place_that_cannot_be_written_is_one_line(cache, caplog):
    cache.parent.write_text("a file where the folder should be")
    tune.write(WAYS)
    assert len(lines(caplog)) == 1
    caplog.clear()
    assert tune.read() == {} and len(lines(caplog)) <= 1


def test_a_reader_sees_the_old_file_or_the_new_one(cache):
    tune.write(WAYS)

    def keep_writing(name):
        for turn in range(30):
            tune.write({f"{name} {turn} {i}": "one-shot" for i in range(500)})

    writers = [Thread(target=keep_writing, args=(name,)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        stored = json.loads(cache.read_text())["machines"][tune.machine()]
        assert stored == WAYS or len(stored) == 500
        seen.add(next(iter(stored)))
    assert len(seen) > 1
    assert os.listdir(cache.parent) == [cache.name]


def test_two_variables_turn_it_off(monkeypatch):
    names = ("SPMD_DISABLE_ALLREDUCE_AUTOTUNE", "TLLM_DISABLE_ALLREDUCE_AUTOTUNE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert tune.enabled()
    for name in names:
        for value, on in (("1", False), ("0", True), ("", True)):
            monkeypatch.setenv(name, value)
            assert tune.enabled() == on
        monkeypatch.delenv(name)
    assert {str(way) for way in Way} >= set(WAYS.values()) | set(OTHER.values())
