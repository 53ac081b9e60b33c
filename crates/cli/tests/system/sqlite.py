"""Commits rows to one SQLite database until its time is over, and notes each that was acknowledged.

Arguments: the database, who writes, seconds, the file of notes. A commit that failed may have happened or not. `check` in the
place of the seconds: every noted row is there, none twice, and the database is whole.
"""

import os
import sqlite3
import sys
import time

path, who, seconds, notes = sys.argv[1:]


def connect():
    database = sqlite3.connect(path, timeout=60, isolation_level=None)
    # FULL does not sync the directory in which a commit removes the journal.
    database.execute("PRAGMA synchronous=EXTRA")
    return database


def check():
    database = connect()
    whole = database.execute("PRAGMA integrity_check").fetchall()
    assert whole == [("ok",)], whole
    found = [number for (number,) in database.execute("SELECT number FROM rows WHERE who = ?", (who,))]
    assert len(found) == len(set(found)), "a row is there twice"
    with open(notes) as lines:
        noted = [int(line) for line in lines]
    lost = sorted(set(noted) - set(found))
    assert not lost, f"{len(lost)} of {len(noted)} commits are lost: {lost[:9]}"
    total, rows = database.execute("SELECT (SELECT total FROM sum), (SELECT count(*) FROM rows)").fetchone()
    assert total == rows, f"{total} counted, {rows} there"
    print(len(noted), len(found))


def write(out, end):
    number, failed = 0, 0
    while time.time() < end:
        number += 1
        try:
            database = connect()
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO rows VALUES (?, ?, ?)", (who, number, os.urandom(300)))
            database.execute("UPDATE sum SET total = total + 1")
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            failed += 1
            assert "malformed" not in str(error), error
            time.sleep(0.05)
        else:
            os.write(out, b"%d\n" % number)
        finally:
            database.close()
    print(number, failed)


if seconds == "check":
    check()
elif seconds == "make":
    database = connect()
    database.execute("CREATE TABLE rows (who TEXT, number INTEGER, filling BLOB, PRIMARY KEY (who, number))")
    database.execute("CREATE TABLE sum (total INTEGER)")
    database.execute("INSERT INTO sum VALUES (0)")
    database.close()
else:
    write(os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND), time.time() + float(seconds))
