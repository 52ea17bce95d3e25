"""Processes that torchrun has started again meet each other, and none that died before."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from vitral.collectives import _name_attempt
from vitral.devices import World
from vitral.errors import VitralError


def make_store() -> Store:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def start(store: Store, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(_name_attempt, store, World(rank=rank, size=size), 20.0) for rank in reversed(range(size))]
        return {job.result() for job in jobs}


def test_each_start_has_a_name_of_its_own() -> None:
    store = make_store()
    names = [start(store, 3) for _ in range(4)]
    assert [len(name) for name in names] == [1, 1, 1, 1]
    assert len(set.union(*names)) == 4


def test_processes_that_died_before_they_met_are_ignored() -> None:
    """The store still has the token of a process that never found the others, and that of a whole start before."""
    store = make_store()
    before = start(store, 2)
    store.set("vitral/token/1", "dead")
    store.set("vitral/token/2", "dead, too")
    after = start(store, 3)
    assert len(after) == 1
    assert after != before


def test_a_process_that_does_not_start_is_named() -> None:
    with pytest.raises(VitralError, match=r"Process 1 did not start within 0\.1 seconds"):
        _name_attempt(make_store(), World(rank=0, size=2), 0.1)
