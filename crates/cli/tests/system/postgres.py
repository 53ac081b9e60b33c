"""Moves money between accounts in a Postgres cluster until its time is over, and notes each transfer that was acknowledged.

Arguments: the folder of the cluster, seconds, the file of notes, Postgres' own programs. Runs as the user who owns the
folder. The server is started again when it has stopped by itself, which it does when an fsync fails. At the end every noted
transfer is there once, no money was made, and the checksums of all pages agree.
"""

import collections
import os
import subprocess
import sys
import time

data, seconds, notes, programs = sys.argv[1:]
ACCOUNTS = 200
starts = 0
complaints = collections.Counter()


def program(name, *arguments, **more):
    return subprocess.run([os.path.join(programs, name), *arguments], capture_output=True, text=True, **more)


def sql(text):
    more = {"input": text, "timeout": 120}
    return program("psql", "-h", data, "-d", "postgres", "-qAtX", "-v", "ON_ERROR_STOP=1", **more)


def start():
    global starts
    for _ in range(60):
        done = program("pg_ctl", "-D", data, "-w", "-t", "60", "-l", os.path.join(data, "log.txt"), "start")
        if done.returncode == 0:
            starts += 1
            return
        time.sleep(1)
    sys.exit(f"Postgres does not start: {done.stdout}{done.stderr}")


def made(text):
    done = sql(text)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def transfers(out, end):
    number, failed = 0, 0
    while time.time() < end:
        batch = []
        for _ in range(20):
            number += 1
            one, other = number * 7 % ACCOUNTS, number * 13 % ACCOUNTS
            batch.append(
                f"BEGIN; UPDATE accounts SET balance = balance - {number % 97} WHERE id = {one};"
                f" UPDATE accounts SET balance = balance + {number % 97} WHERE id = {other};"
                f" INSERT INTO history VALUES ({number}, repeat('x', 200)); COMMIT;\n\\echo done {number}\n"
            )
        done = sql("".join(batch))
        for line in done.stdout.splitlines():
            if line.startswith("done "):
                os.write(out, line[5:].encode() + b"\n")
        if done.returncode != 0:
            failed += 1
            complaints[done.stderr.strip().splitlines()[0] if done.stderr.strip() else "no word"] += 1
            if program("pg_ctl", "-D", data, "status").returncode != 0:
                start()
            time.sleep(0.2)
    return number, failed


options = "-c fsync=on -c checkpoint_timeout=30s -c listen_addresses= -c unix_socket_directories=" + data
done = program("initdb", "-D", data, "--data-checksums", "--no-instructions", "-A", "trust")
assert done.returncode == 0, done.stderr
with open(os.path.join(data, "postgresql.conf"), "a") as configuration:
    for option in options.split("-c ")[1:]:
        name, value = option.strip().split("=", 1)
        configuration.write(f"{name} = '{value}'\n")
start()
made(
    "CREATE TABLE accounts (id int PRIMARY KEY, balance bigint);"
    "CREATE TABLE history (number int PRIMARY KEY, filling text);"
    f"INSERT INTO accounts SELECT id, 0 FROM generate_series(0, {ACCOUNTS - 1}) id;"
)
number, failed = transfers(os.open(notes, os.O_WRONLY | os.O_CREAT), time.time() + float(seconds))
program("pg_ctl", "-D", data, "-m", "immediate", "stop")
start()
found = {int(line) for line in made("SELECT number FROM history").split()}
with open(notes) as lines:
    noted = {int(line) for line in lines}
balance = made("SELECT sum(balance) FROM accounts")
wrong = program("pg_ctl", "-D", data, "-m", "fast", "-w", "stop").returncode
checked = program("pg_checksums", "-D", data, "--check")
lost = sorted(noted - found)
print(f"{len(noted)} acknowledged of {number}, {len(found)} there, {failed} batches failed, {starts} starts")
for complaint, times in complaints.most_common(5):
    print(f"{times} times: {complaint}")
assert not lost, f"{len(lost)} acknowledged transfers are lost: {lost[:9]}"
assert balance == "0", f"the sum of all accounts is {balance}"
assert wrong == 0 and checked.returncode == 0, checked.stdout + checked.stderr
