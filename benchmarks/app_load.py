"""How does `seecause serve` hold up: many users who brush at once, and thousands of bad requests?

    python benchmarks/app_load.py --users 20 --seconds 60 --bad 2000

Starts the server as a user would (two cores: taskset -c 0,1), opens sessions, and lets each brush
one patch after the other as the page does: the next question when the last one is answered. First
one user alone, then one while another audits, then all. Prints how long answers took, what failed,
and the server's memory at the start and at the end. Then requests that are wrong in many ways: none
may end the server, give an error of its own, or read a file.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.app.test_server import bad_requests

SIDE = 12  # patches of a side of critters-vit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--alone", type=float, default=10, help="seconds of one user alone")
    parser.add_argument("--bad", type=int, default=2000)
    parser.add_argument("--model", default="builtin:critters-vit")
    given = parser.parse_args()
    command = [sys.executable, "-m", "seecause", "serve", "--model", given.model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+/", server.stdout.readline())[0]
        process, busy = psutil.Process(server.pid), psutil.getloadavg()[0]
        print(f"{given.model} at {address}, {psutil.cpu_count()} cores, load before: {busy:.1f}")
        brush(address, 1, given.alone, process)
        with auditing(address):
            print("the same while another user audits:")
            brush(address, 1, given.alone, process)
        brush(address, given.users, given.seconds, process)
        annoy(address, given.bad)
        print(f"server still there: {server.poll() is None}")
    finally:
        server.terminate()
        log = server.communicate(timeout=30)[1]
    print(f"lines in the server's log: {len(log.splitlines())}")


def brush(address: str, users: int, seconds: float, process: psutil.Process) -> None:
    """Closed loop: every user waits for an answer before the next stroke."""
    times: list[float] = []
    errors: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    people = [
        threading.Thread(target=user, args=(address, place, ends, times, errors))
        for place in range(users)
    ]
    for person in people:
        person.start()
    time.sleep(min(5.0, seconds / 4))  # pictures are opened, every run is recorded
    first, before = process.memory_info().rss / 2**20, process.cpu_times()
    early = len(times)
    for person in people:
        person.join()
    last, after = process.memory_info().rss / 2**20, process.cpu_times()
    used = after.user + after.system - before.user - before.system
    per_answer = 1000 * used / max(1, len(times) - early)
    times.sort()
    at = {share: times[int(share * (len(times) - 1))] * 1000 for share in (0.5, 0.95, 0.99, 1.0)}
    shown = ", ".join(f"p{100 * share:.0f} {value:.0f} ms" for share, value in at.items())
    print(
        f"{users} users, {seconds:.0f} s: {len(times)} answers, {len(times) / seconds:.0f} a second"
        f"; {shown}; errors: {dict(errors) or 'none'}"
    )
    print(
        f"    server: {per_answer:.1f} ms of processor time an answer,"
        f" memory {first:.0f} MB at the start, {last:.0f} MB at the end"
    )


@contextmanager
def auditing(address: str) -> Iterator[None]:
    """Another user's audit runs meanwhile, and is cancelled."""
    with httpx.Client(base_url=address, timeout=60) as client:
        headers = {"x-seecause-session": client.post("/api/session").json()["session"]}
        request = {"model": "critters-vit", "data": "critters:certified:test", "limit": 512}
        answer = client.post("/api/run/repair/audit", json=request, headers=headers).json()
        yield
        state = client.get(f"/api/jobs/{answer['job']}", headers=headers).json()
        print(f"    the audit: {state['state']}, {state.get('words', '')}")
        client.delete(f"/api/jobs/{answer['job']}", headers=headers)


def user(address: str, place: int, ends: float, times: list[float], errors: Counter[str]) -> None:
    """A light client: it shares the processors with the server that it measures."""
    draw, where = random.Random(place), urlsplit(address)
    line = http.client.HTTPConnection(where.hostname, where.port, timeout=60)

    def ask(method: str, path: str, body: object = None) -> dict:
        line.request(method, path, None if body is None else json.dumps(body), headers)
        return json.loads(line.getresponse().read())

    headers = {"content-type": "application/json"}
    headers |= {"x-seecause-session": ask("POST", "/api/session")["session"]}
    headers |= {"x-seecause-slot": "brush"}
    request = {"model": "critters-vit", "picture": f"s{place % 16}", "patches": []}
    opened = {key: request[key] for key in ("model", "picture")}
    ask("POST", "/api/run/explain/look", opened)  # as the page does before anybody can brush
    spot = draw.randrange(SIDE * SIDE)
    while time.monotonic() < ends:
        spot = (spot + draw.choice([-1, 1, -SIDE, SIDE])) % (SIDE * SIDE)
        request["patches"] = sorted({*request["patches"], spot})[-40:]
        begins = time.perf_counter()
        state = ask("POST", "/api/run/explain/brush", request)
        while state.get("state") in ("waiting", "running"):
            state = ask("GET", f"/api/jobs/{state['job']}")
        if state.get("state") == "done":
            times.append(time.perf_counter() - begins)
        else:
            errors[json.dumps(state)[:120]] += 1
    line.close()


def annoy(address: str, count: int) -> None:
    """Bad requests, one after the other; what came back by status."""
    statuses: Counter[int] = Counter()
    leaks = 0
    with httpx.Client(base_url=address, timeout=60) as client:
        session = client.post("/api/session").json()["session"]
        for method, path, content in bad_requests(count, seed=1):
            headers = {"x-seecause-session": session, "content-type": "application/json"}
            try:
                answer = client.request(method, path, content=content, headers=headers)
            except httpx.RemoteProtocolError:  # not even HTTP: refused by uvicorn
                statuses[0] += 1
                continue
            statuses[answer.status_code] += 1
            leaks += any(word in answer.text for word in ("Traceback", "root:", "site-packages"))
    print(f"{count} bad requests: {dict(sorted(statuses.items()))}; leaks: {leaks}")


if __name__ == "__main__":
    main()
