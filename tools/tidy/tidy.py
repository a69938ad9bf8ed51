#!/usr/bin/env python3
"""Checks the tree against the house rules (rules.py). Prints file:line: rule for each breach and ends with status 1.

usage: tidy.py [ROOT]     ROOT is the repository, by default the one this file is in.
"""

import pathlib
import subprocess
import sys

sys.dont_write_bytecode = True
import rules  # noqa: E402

SKIPPED_FOLDERS = {"build", "__pycache__", "node_modules"}


def list_files(root):
    """Files of the repository: tracked or not yet ignored; without git, everything that is not a build output."""
    try:
        listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                capture_output=True, timeout=60, check=True)
        names = listed.stdout.decode().split("\0")
        inside = subprocess.run(["git", "-C", str(root), "rev-parse", "--show-prefix"], capture_output=True, timeout=60)
        if inside.stdout.strip() == b"":  # ROOT is the top of the repository, not a folder ignored by another one
            return sorted({name for name in names if name and (root / name).is_file()})
    except (OSError, subprocess.SubprocessError):
        pass
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(str(path) for path in files
                  if not any(part in SKIPPED_FOLDERS or part == ".git" or part.endswith(".egg-info") for part in path.parts))


def breaches(root):
    """(path, line, message), sorted by file."""
    paths = list_files(root)
    texts = {}
    for path in paths:
        if path.endswith(rules.SOURCES + (".md", "CMakeLists.txt")):
            texts[path] = (root / path).read_text(encoding="utf-8", errors="replace")
    found = [(path, 0, message) for path, message in rules.check_folders(paths, texts)]
    for path, text in texts.items():
        if path.endswith(".md"):
            found += [(path, line, message) for line, message in rules.check_text(path, text)]
        elif path.endswith(rules.SOURCES):
            for check in rules.FILE_CHECKS:
                found += [(path, line, message) for line, message in check(path, text)]
            if path.startswith(rules.PURE_FOLDERS):
                found += [(path, line, message) for line, message in rules.check_pure_closure(path, text, texts)]
    return sorted(set(found)), len(texts)


def main(arguments):
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parents[2]).resolve()
    if not (root / "CMakeLists.txt").is_file():
        print(f"{root} is not the repository: it has no CMakeLists.txt", file=sys.stderr)
        return 2
    found, num_files = breaches(root)
    for path, line, message in found:
        print(f"{path}:{line}: {message}" if line else f"{path}: {message}")
    print(f"{len(found)} breaches of the house rules in {num_files} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
