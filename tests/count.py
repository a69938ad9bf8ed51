"""How many tests a log tells of. usage: count.py ctest|unittest LOG; prints "PASSED FAILED"."""

import re
import sys

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RESULT = re.compile(r"^ *\d+/\d+ Test +#(\d+): .*?(Passed|\*\*\*[A-Z]\w+|Not Run|Disabled)")


def catch_summary(line):
    """(passed, failed) of the last line of a Catch2 program, or None."""
    found = re.search(r"All tests passed \(\d+ assertions? in (\d+) test cases?\)", line)
    if found:
        return int(found.group(1)), 0
    if "test cases:" in line:
        numbers = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)", line)}
        return numbers.get("passed", 0), numbers.get("failed", 0)
    return None


def count_ctest(lines):
    """Test cases of Catch2 programs (a program that several ranks run counts once); any other test counts as one."""
    cases, passed, failed = {}, 0, 0
    for line in map(lambda text: _COLOR.sub("", text), lines):
        output = re.match(r"(\d+): (.*)", line)
        if output:
            summary = catch_summary(output.group(2))
            if summary:
                cases[output.group(1)] = summary
            continue
        result = _RESULT.match(line)
        if result:
            good = result.group(2) == "Passed"
            ok, bad = cases.get(result.group(1), (1, 0) if good else (0, 1))
            # A program may say that all is well and then crash.
            passed, failed = passed + ok, failed + (bad or (0 if good else 1))
    return passed, failed


def count_unittest(lines):
    text = "".join(lines)
    ran = re.findall(r"^Ran (\d+) tests? in", text, re.MULTILINE)
    if not ran:
        return 0, 1
    words = re.findall(r"^(?:OK|FAILED) \((.*)\)$", text, re.MULTILINE)
    numbers = {word: int(number) for word, number in re.findall(r"(\w+)=(\d+)", words[-1] if words else "")}
    failed = numbers.get("failures", 0) + numbers.get("errors", 0)
    return int(ran[-1]) - failed - numbers.get("skipped", 0), failed


if __name__ == "__main__":
    with open(sys.argv[2], errors="replace") as log:
        print(*{"ctest": count_ctest, "unittest": count_unittest}[sys.argv[1]](log.readlines()))
