"""The journal: in order, whole or not at all, cut into the same batches again, small, and readable after damage."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from scrlearn.errors import CheckpointError
from scrlearn.service.journal import Item, Journal, Receipt, Request
from scrlearn.service.problems import Problem


def images(*labels: str, size: int = 64) -> list[Item]:
    return [Item("image", label, bytes([n % 256]) * size) for n, label in enumerate(labels)]


@pytest.fixture
def journal(tmp_path: Path):
    journal = Journal(tmp_path / "j.sqlite3")
    yield journal
    journal.close()


def batches(journal: Journal, size: int = 10, after: int = 0) -> list[tuple[list[str], int]]:
    found = []
    while (batch := journal.next_batch(after, size)) is not None:
        found.append(([f"{item.kind[0]}:{item.label}" for item in batch.items], batch.last))
        after = batch.last
    return found


def test_every_commit_reaches_the_disk(journal: Journal) -> None:
    pragma = {name: journal._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")}
    assert pragma == {"synchronous": 2, "journal_mode": "wal"}  # 2: FULL


def test_requests_of_one_commit_get_consecutive_places(journal: Journal) -> None:
    answers = journal.append([Request(images("a", "b")), Request(images("c"), "k"), Request(images("c"), "k")])
    assert answers == [Receipt(1, 2, False), Receipt(3, 3, False), Receipt(3, 3, True)]
    assert journal.last == len(journal) == 3


def test_a_key_for_another_request_is_a_problem_for_that_one_alone(journal: Journal) -> None:
    journal.append([Request(images("a"), "k")])
    problem, receipt = journal.append([Request(images("b"), "k"), Request(images("c"))])
    assert isinstance(problem, Problem)
    assert problem.code == "key-reused"
    assert receipt == Receipt(2, 2, False)


def test_admission_is_asked_for_new_requests_only(journal: Journal) -> None:
    refuse = lambda request: Problem("invalid", "no")  # noqa: E731
    [refused] = journal.append([Request(images("a"), "k")], refuse)
    assert isinstance(refused, Problem)
    assert len(journal) == 0
    journal.append([Request(images("a"), "k")])
    assert journal.append([Request(images("a"), "k")], refuse) == [Receipt(1, 1, True)]


def test_batches_take_what_is_there_and_forgetting_stands_alone(journal: Journal) -> None:
    journal.append([Request(images(*"abcde")), Request([Item("forget", "a")]), Request(images(*"fg"))])
    assert batches(journal, size=3) == [
        (["i:a", "i:b", "i:c"], 3),
        (["i:d", "i:e"], 5),
        (["f:a"], 6),
        (["i:f", "i:g"], 8),
    ]


def test_batches_are_the_same_when_read_again(tmp_path: Path) -> None:
    """The end of a batch is written down before it is learned, whatever has arrived since."""
    path = tmp_path / "j.sqlite3"
    journal = Journal(path)
    journal.append([Request(images("a", "b", "c"))])
    assert journal.next_batch(0, 10).last == 3
    journal.append([Request(images("d", "e"))])
    expected = batches(journal)
    assert [last for _, last in expected] == [3, 5]
    journal.close()
    again = Journal(path)
    assert batches(again) == expected
    again.close()


def test_a_failed_commit_leaves_nothing_behind(journal: Journal) -> None:
    journal.append([Request(images("a"))])
    with pytest.raises(ZeroDivisionError):
        journal.append([Request(images("b"), "k")], lambda request: 1 / 0)
    assert (journal.last, len(journal)) == (1, 1)
    assert journal.append([Request(images("b"), "k")]) == [Receipt(2, 2, False)]


def test_a_full_disk_accepts_nothing_and_passes(journal: Journal) -> None:
    """SQLite itself says that the disk is full: the file may not grow."""
    journal.append([Request(images("a"))])
    journal._db.execute(f"PRAGMA max_page_count = {journal._db.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.append([Request(images("b", size=100_000), "k")])
    assert journal.last == 1
    journal._db.execute("PRAGMA max_page_count = 1000000")
    assert journal.append([Request(images("b", size=100_000), "k")]) == [Receipt(2, 2, False)]


def test_a_cut_removes_entries_and_their_bytes(tmp_path: Path) -> None:
    secret = b"a picture that must not be found on the disk"
    path = tmp_path / "j.sqlite3"
    journal = Journal(path)
    journal.append([Request([Item("image", "secret-label", secret * 50)]), Request(images("b"))])
    journal.next_batch(0, 1)
    assert any(secret in file.read_bytes() for file in tmp_path.iterdir())
    journal.cut(1)
    assert (journal.begin, journal.last, len(journal)) == (1, 2, 1)
    assert not any(secret in file.read_bytes() or b"secret-label" in file.read_bytes() for file in tmp_path.iterdir())
    assert batches(journal, after=1) == [(["i:b"], 2)]
    journal.close()


def test_the_file_stays_small(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite3")
    sizes = []
    for turn in range(30):
        journal.append([Request(images(*"abcdefghij", size=3072))])
        journal.cut(journal.last - 20)
        if turn >= 3:
            sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert max(sizes) <= 1.2 * sizes[0]
    journal.close()


def test_places_go_on_after_everything_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite3"
    journal = Journal(path)
    journal.append([Request(images(*"abc"), "k")])
    journal.cut(3)
    journal.close()
    journal = Journal(path)
    assert (journal.begin, journal.last) == (3, 3)
    journal.close()
    path.unlink()
    journal = Journal(path, floor=7)  # a snapshot knows of seven
    assert journal.append([Request(images("d"))]) == [Receipt(8, 8, False)]
    journal.close()


def test_keys_are_forgotten_by_age_and_number(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for n in range(5):
        monkeypatch.setattr(time, "time", lambda n=n: now + n)
        journal.append([Request(images("a"), f"k{n}")])
    journal.drop_keys(most=3, age=100)
    left = [row[0] for row in journal._db.execute("SELECT key FROM keys ORDER BY key")]
    assert left == ["k2", "k3", "k4"]
    journal.drop_keys(most=3, age=0.5)
    assert [row[0] for row in journal._db.execute("SELECT key FROM keys")] == ["k4"]


def test_a_second_process_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrlearn.service.journal.BUSY_SECONDS", 0.05)
    journal = Journal(tmp_path / "j.sqlite3")
    with pytest.raises(CheckpointError, match=r"locked.*another server"):
        Journal(tmp_path / "j.sqlite3")
    journal.close()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(CheckpointError, match="newer"):
        Journal(path)


# --------------------------------------------------------------------------------------------------------------- damage


def filled(path: Path, entries: int = 60, size: int = 3000) -> None:
    journal = Journal(path)
    for n in range(entries):
        journal.append([Request([Item("image", f"label{n}", bytes([n]) * size)], f"key{n}")])
    journal.close()  # writes the log back into the file


def test_an_entry_whose_bytes_changed_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite3"
    filled(path, 5)
    content = bytearray(path.read_bytes())
    place = content.index(bytes([2]) * 1000)
    content[place + 500] ^= 1
    path.write_bytes(content)
    journal = Journal(path)
    batch = journal.next_batch(0, 10)
    assert [item.label for item in batch.items] == ["label0", "label1", "label3", "label4"]
    assert (batch.last, batch.lost) == (5, 1)
    journal.close()


@pytest.mark.parametrize("damage", ["middle", "end", "truncated"])
def test_a_damaged_file_is_salvaged(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "j.sqlite3"
    filled(path)
    content = bytearray(path.read_bytes())
    pages = len(content) // 4096
    if damage == "middle":
        content[pages // 2 * 4096 : pages // 2 * 4096 + 2 * 4096] = b"\x55" * 2 * 4096
    elif damage == "end":
        content[-3 * 4096 :] = b"\x55" * 3 * 4096
    else:
        del content[-5 * 4096 :]
    path.write_bytes(content)
    journal = Journal(path)
    assert journal.salvaged
    found = [item.label for labels, _ in _items(journal) for item in labels]
    assert 40 <= len(found) < 60
    assert found == sorted(found, key=lambda label: int(label[5:])), "in order, none twice"
    [receipt] = journal.append([Request(images("new"))])
    assert receipt.first > 40
    journal.close()
    again = Journal(path)
    assert not again.salvaged
    again.close()


def _items(journal: Journal) -> list[tuple[list[Item], int]]:
    found, after, lost = [], 0, 0
    while (batch := journal.next_batch(after, 10)) is not None:
        found.append((batch.items, batch.last))
        after, lost = batch.last, lost + batch.lost
    assert after == journal.last, "what is known to have been there is passed over"
    assert lost == journal.last - sum(len(items) for items, _ in found)
    return found


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite3"
    path.write_bytes(b"\x13" * 20_000)
    journal = Journal(path)
    assert journal.salvaged
    assert len(journal) == 0
    journal.close()


def test_a_salvage_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite3"
    filled(path, 3)
    good = path.read_bytes()
    path.with_name("j.sqlite3.salvaged").write_bytes(good)
    path.write_bytes(b"damaged")
    path.with_name("j.sqlite3-wal").write_bytes(b"of the damaged file")
    journal = Journal(path)
    assert len(journal) == 3
    assert not path.with_name("j.sqlite3.salvaged").exists()
    journal.close()


def test_a_torn_end_of_the_log_costs_only_what_was_torn(tmp_path: Path) -> None:
    """What a crash in the middle of a write leaves: commits before it stay."""
    path = tmp_path / "j.sqlite3"
    journal = Journal(path)
    log = path.with_name("j.sqlite3-wal")
    journal.append([Request(images("a"))])
    journal.append([Request(images("b"))])
    before = log.stat().st_size
    journal.append([Request(images("c"))])
    assert log.stat().st_size > before
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    journal.close()
    for torn in (files[log.name][: before + 100], files[log.name][:before] + b"\x55" * 4000):
        folder = tmp_path / f"copy{len(torn)}"
        folder.mkdir()
        (folder / path.name).write_bytes(files[path.name])
        (folder / log.name).write_bytes(torn)
        again = Journal(folder / path.name)
        assert batches(again) == [(["i:a", "i:b"], 2)]
        assert again.append([Request(images("d"))]) == [Receipt(3, 3, False)]
        again.close()
