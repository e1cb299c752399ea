#!/usr/bin/env python3
"""Compares recant's speed on this machine's CPU with llama.cpp's, on models of the same shape and storage width.

See README.md beside this file.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SDIST = "llama_cpp_python-0.3.36"
REQUIREMENT = "llama-cpp-python==0.3.36"
WIDTHS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
SIDES = ("llama.cpp", "recant")
# llama.cpp's builds. llamafile's kernels are its default; without them it is faster in some measures.
BUILDS = {"llamafile": "ON", "plain": "OFF"}


class Failure(Exception):
    """What cannot go on, in words for the user."""


def run(command, log):
    """Runs a long step at low priority with its output in a file."""
    print(f"{' '.join(map(str, command))}\n  (output in {log})", file=sys.stderr)
    nice = ["nice"] if shutil.which("nice") else []
    with open(log, "w") as out:
        code = subprocess.run([*nice, *command], stdout=out, stderr=subprocess.STDOUT).returncode
    if code != 0:
        tail = "".join(open(log, errors="replace").readlines()[-15:])
        raise Failure(f"{command[0]} ended with status {code}. The end of {log}:\n{tail}")


# The llama.cpp side.


def sources(work):
    """llama.cpp's sources, out of the source distribution of llama-cpp-python."""
    folder = work / SDIST / "vendor" / "llama.cpp"
    if folder.exists():
        return folder
    archive = work / f"{SDIST}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        run([*pip, "--dest", work, REQUIREMENT], work / "download.log")
    if not archive.exists():
        raise Failure(f"pip downloaded {REQUIREMENT}, yet there is no {archive}")
    unpacked = work / "unpacked"
    with tarfile.open(archive) as tar:
        wanted = [m for m in tar.getmembers() if m.name.startswith(f"{SDIST}/vendor/llama.cpp/")]
        tar.extractall(unpacked, wanted, filter="data")
    (unpacked / SDIST).rename(work / SDIST)
    unpacked.rmdir()
    return folder


def build_peer(work, build):
    """Builds peer.cpp with llama.cpp in it. Takes some minutes the first time."""
    if shutil.which("cmake") is None:
        raise Failure(
            "cmake is needed to build llama.cpp and is not on the PATH. Install it with `pip install cmake` "
            "or your system's packages (`apt install cmake g++`)."
        )
    folder = work / f"build-{build}"
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DLLAMA_CPP={sources(work)}", f"-DGGML_LLAMAFILE={BUILDS[build]}"]
    run(["cmake", "-S", HERE, "-B", folder, *options], work / f"configure-{build}.log")
    jobs = str(os.cpu_count())
    run(["cmake", "--build", folder, "--target", "peer", "--parallel", jobs], work / f"build-{build}.log")
    return folder / "peer"


def model(work, width):
    """The GGUF file of random weights of a width."""
    try:
        import weights
    except ImportError as error:
        raise Failure(f"{error}. Install what writes the models: `pip install numpy gguf`.") from error
    path = work / f"{WIDTHS[width]}.gguf"
    if not path.exists():
        print(f"writing {path}", file=sys.stderr)
        weights.write(path, width)
    return path


# The recant side.


def build_recant():
    """Builds the `bench` example and gives its path."""
    command = ["cargo", "build", "--release", "-p", "recant", "--example", "bench"]
    print(" ".join(command), file=sys.stderr)
    try:
        built = subprocess.run([*command, "--message-format=json-render-diagnostics"], cwd=ROOT, stdout=subprocess.PIPE)
    except FileNotFoundError as error:
        raise Failure("cargo is needed to build recant and is not on the PATH.") from error
    if built.returncode != 0:
        raise Failure(f"`{' '.join(command)}` ended with status {built.returncode}")
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "bench":
            return Path(message["executable"])
    raise Failure(f"`{' '.join(command)}` built no executable")


def from_bench(report, width):
    """The measures of a width in the report of recant's bench, in the form that peer.cpp prints."""
    try:
        return {
            "decode_tokens_per_s": report["decode"][width]["tokens_per_s"],
            "verify_ms": report["verify_ms"][width],
            "prefill": report["prefill"][width],
        }
    except (KeyError, TypeError) as error:
        raise Failure(f"the report of recant's bench on {width} lacks {error}; is this script of the same commit?") from error


# Measuring.


def busy_seconds():
    """Seconds that this machine's cores were busy or taken by its host since it started; None where nothing says so."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    except OSError:
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(command):
    """The JSON object that a command prints, and the CPU seconds that all else on the machine used meanwhile."""
    busy, own = busy_seconds(), own_seconds()
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Failure(f"`{' '.join(map(str, command))}` ended with status {done.returncode}")
    others = None if busy is None else busy_seconds() - busy - (own_seconds() - own)
    try:
        return json.loads(done.stdout), others
    except json.JSONDecodeError as error:
        raise Failure(f"`{' '.join(map(str, command))}` did not print JSON: {error}") from error


def median(reports):
    """The median of each number in reports of one form."""
    first = reports[0]
    if isinstance(first, dict):
        return {key: median([report[key] for report in reports]) for key in first}
    return statistics.median(reports) if isinstance(first, (int, float)) else first


def compare(work, widths, sides, rounds, threads):
    """Runs the programs in turn and gives all their reports."""
    programs = []
    if "llama.cpp" in sides:
        models = {width: model(work, width) for width in widths}
        for build in BUILDS:
            peer = build_peer(work, build)
            programs.append(("llama.cpp", build, lambda width, peer=peer: [peer, models[width], threads]))
    if "recant" in sides:
        bench = build_recant()
        options = ["--json", "--threads", threads, "--only"]
        programs.append(("recant", "release", lambda width: [bench, *options, width]))
    runs = []
    for number in range(rounds):
        for width in widths:
            for side, build, command in programs:
                print(f"round {number + 1} of {rounds}: {width}, {side} ({build})", file=sys.stderr)
                started = time.monotonic()
                report, others = measure(command(width))
                seconds = time.monotonic() - started
                runs.append({
                    "side": side,
                    "build": build,
                    "width": width,
                    "round": number + 1,
                    "seconds": round(seconds, 1),
                    "cores_used_by_others": None if others is None else round(max(0.0, others) / seconds, 2),
                    "report": report if side == "llama.cpp" else from_bench(report, width),
                })
    return runs


def better(a, b):
    """Of two reports of one form, the better number of each measure: speeds are better high, times low."""
    pick = {"decode_tokens_per_s": max, "prefill": max, "verify_ms": min, "round_ms": min}
    best = {}
    for name, choose in pick.items():
        if isinstance(a[name], dict):
            best[name] = {key: choose(a[name][key], b[name][key]) for key in a[name]}
        else:
            best[name] = choose(a[name], b[name])
    return best


def medians(runs):
    """Medians over the rounds, by width and side; llama.cpp's are those of its better build in each measure."""
    table = {}
    for width in WIDTHS:
        by_build = {}
        for run in runs:
            if run["width"] == width:
                by_build.setdefault((run["side"], run["build"]), []).append(run["report"])
        for (side, _build), reports in by_build.items():
            sides = table.setdefault(width, {})
            report = median(reports)
            sides[side] = better(sides[side], report) if side in sides else report
    return {width: sides for width, sides in table.items() if sides}


# Showing.


def machine():
    """The processor's name, as well as this system knows it."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def cells(*values):
    shown = ["–" if v is None else v if isinstance(v, str) else f"{v:.2f}" if v < 10 else f"{v:.1f}" for v in values]
    return "| " + " | ".join(shown) + " |"


def over(a, b):
    return None if a is None or b is None else a / b


def markdown(table):
    """Two tables: speeds, and what verification costs. A ratio above 1 says that recant is faster."""
    lines = [
        "| width | tokens a second | llama.cpp | recant | recant over llama.cpp |",
        "| --- | --- | --- | --- | --- |",
    ]
    for width, sides in table.items():
        theirs, ours = (sides.get(side, {}) for side in SIDES)
        name = f"{width} ({WIDTHS[width]})"
        a, b = theirs.get("decode_tokens_per_s"), ours.get("decode_tokens_per_s")
        lines.append(cells(name, "decode", a, b, over(b, a)))
        theirs, ours = theirs.get("prefill", {}), ours.get("prefill", {})
        for prompt in sorted(theirs or ours, key=int):
            a, b = theirs.get(prompt), ours.get(prompt)
            lines.append(cells(name, f"prefill {prompt}", a, b, over(b, a)))
    lines += [
        "",
        "| width | rows | llama.cpp, ms | with a way back, ms | recant, ms | speed over llama.cpp | with a way back "
        "| llama.cpp over one row | recant over one row |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for width, sides in table.items():
        theirs, ours = (sides.get(side, {}) for side in SIDES)
        plain, back, ours = theirs.get("verify_ms", {}), theirs.get("round_ms", {}), ours.get("verify_ms", {})
        for rows in sorted(plain or ours, key=int):
            a, b, c = plain.get(rows), back.get(rows), ours.get(rows)
            costs = over(b, back.get("1")), over(c, ours.get("1"))
            lines.append(cells(f"{width} ({WIDTHS[width]})", rows, a, b, c, over(a, c), over(b, c), *costs))
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "peers", help="folder for builds and models")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side (default 2)")
    parser.add_argument("--only", choices=WIDTHS, help="measure this width alone")
    parser.add_argument("--side", choices=SIDES, help="measure this side alone")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return args


def main():
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    widths = [args.only] if args.only else list(WIDTHS)
    sides = [args.side] if args.side else list(SIDES)
    runs = compare(args.work.resolve(), widths, sides, args.rounds, args.threads)
    table = medians(runs)
    results = {
        "machine": machine(),
        "threads": args.threads,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "llama.cpp": REQUIREMENT,
        "medians": table,
        "runs": runs,
    }
    path = args.work / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(table))
    others = max((run["cores_used_by_others"] or 0 for run in runs), default=0)
    print(f"\n{results['machine']}; {args.threads} threads; medians of {args.rounds} runs in turn; llama.cpp of {REQUIREMENT}.")
    print(f"Other programs used up to {others:.2f} cores meanwhile. All runs are in {path}.")
    if others > 0.1:
        print("warning: the machine was not idle; llama.cpp's threads spin, and suffer most from it.", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"error: {failure}")
