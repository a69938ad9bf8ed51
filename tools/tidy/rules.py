"""The house rules as data and small checks. Each check yields (line, message); line 0 is the whole file."""

import re

TOP_LEVEL = {"proto", "controller", "worker", "kernels", "common", "deploy", "tests", "tools"}
CXX = (".h", ".cc", ".cu", ".cuh")
SOURCES = CXX + (".py", ".sh", ".proto")

MAX_LINES = 450
MAX_KERNEL_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_README_LINES = 40

# Folder -> what its files may include of ours, by the longest folder that fits. "lrmoe/v1/" is the generated code.
ALLOWED_INCLUDES = {
    "common": ["common/"],
    "proto": ["common/", "proto/", "lrmoe/v1/"],
    "kernels": ["kernels/"],
    "controller": ["common/", "proto/", "lrmoe/v1/", "controller/"],
    "controller/planner": ["common/", "controller/planner/"],
    "controller/core": ["common/", "controller/planner/", "controller/core/"],
    # A plan's form on disk is its form on the wire: of the generated code only the messages, by proto/convert.h.
    "controller/store": ["common/", "proto/convert.h", "controller/core/", "controller/store/"],
    "controller/rpc": ["common/", "proto/", "lrmoe/v1/", "controller/core/", "controller/store/", "controller/rpc/", "controller/server.h",
                       "controller/planner/planner.h", "controller/planner/problem.h"],
    "worker": ["common/", "proto/", "lrmoe/v1/", "kernels/", "worker/"],
    "worker/transport": ["common/", "worker/transport/"],
    "worker/engine": ["common/", "kernels/", "worker/transport/", "worker/engine/"],
    "worker/agent": ["common/", "worker/agent/"],
    # The interfaces of the engine, not its parts.
    "worker/rpc": ["common/", "proto/", "lrmoe/v1/", "worker/agent/", "worker/rpc/", "worker/engine/engine.h",
                   "worker/engine/plan_provider.h", "kernels/interprocess.h"],
    "worker/launcher": ["common/", "worker/launcher/"],
    "worker/client": ["common/", "proto/", "lrmoe/v1/", "worker/client/"],
    "tools": ["common/", "proto/", "lrmoe/v1/"],
    "tools/lrmoectl": ["common/", "proto/", "lrmoe/v1/", "tools/lrmoectl/"],
    "tools/sim": ["common/", "proto/", "lrmoe/v1/", "controller/planner/", "tools/sim/"],
    "tools/bench": ["common/", "kernels/", "controller/", "worker/", "proto/", "lrmoe/v1/", "tools/bench/"],
    "tests": [""],
}

# Time, seed and text come to these as arguments.
PURE_FOLDERS = ("controller/planner/", "controller/core/", "worker/agent/")
BANNED_IN_PURE = re.compile(
    r"^(thread|mutex|shared_mutex|condition_variable|future|atomic|stop_token|chrono|ctime|time\.h|fstream|filesystem"
    r"|iostream|unistd\.h|pthread\.h|sys/.*|spdlog/.*|grpc.*|google/protobuf/.*|lrmoe/v1/.*|mpi\.h|nccl\.h|cuda.*"
    r"|absl/time/.*|absl/synchronization/.*|unordered_map|unordered_set|absl/container/(flat|node)_hash_.*"
    r"|common/(logging|config|config_file|table|deadline)\.h)$")

# Third-party header -> the only files that may include it, each a whole file or a folder.
ONLY_IN = [
    (re.compile(r"^mpi\.h$"), ("worker/transport/mpi.cc", "worker/transport/mpi_transport.")),
    (re.compile(r"^nccl\.h$"), ("worker/transport/nccl.cc", "tests/support/fake_cuda/")),
    (re.compile(r"^cairo"), ("tools/sim/png.cc",)),
    (re.compile(r"^sqlite3"), ("controller/store/", "tests/unit/controller_store/")),
    (re.compile(r"^(dnnl|oneapi/dnnl/)"), ("kernels/", "tests/unit/kernels/")),
    (re.compile(r"^(cuda|cublas).*\.h$"), ("kernels/cuda/", "tests/gpu/", "tests/support/fake_cuda/", "worker/transport/nccl.cc")),
]

# Slow to compile: in .cc files, never in a header that everybody includes.
HEAVY_IN_COMMON = re.compile(r"^(spdlog/|CLI/|nlohmann/json\.hpp|grpcpp/|iostream$|regex$)")

BANNED_WORDS = {"manager", "helper", "helpers", "util", "utils"}
CXX_TYPE = re.compile(r"^\s*(?:template\s*<.*>\s*)?(?:class|struct|union|enum(?:\s+class)?|using)\s+([A-Z]\w*)\b(?!\s*;)")
PYTHON_TYPE = re.compile(r"^\s*class\s+([A-Za-z_]\w*)")
NO_FUNCTION = re.compile(r"(class|struct|union|enum|template|TEST_CASE|TEMPLATE_TEST_CASE|(static )?constexpr|const )")
SNAKE_CASE = re.compile(r"^[a-z0-9_]+(\.[a-z0-9_]+)*$")
SCRIPT_NAME = re.compile(r"^[a-z0-9_-]+\.sh$")  # commands may have hyphens, like other commands
# Included several times on purpose, once per instruction set.
INCLUDED_OFTEN = {"kernels/cpu/passes_body.h"}
UNFINISHED = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|XX" + "X)\\b")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:home|root|work|Users)/\w")
SLEEP = re.compile(r"\b(sleep_for|sleep_until|usleep|nanosleep)\s*\(")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def includes(text):
    """(line, "<" or '"', header) of every include."""
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1), match.group(2)


def folder_rule(path):
    """The entry of ALLOWED_INCLUDES for a file, by its longest known folder."""
    folder = path
    while "/" in folder:
        folder = folder.rsplit("/", 1)[0]
        if folder in ALLOWED_INCLUDES:
            return folder
    return None


def check_includes(path, text):
    folder = folder_rule(path)
    pure = path.startswith(PURE_FOLDERS)
    for line, _, header in includes(text):
        ours = header.split("/")[0] in TOP_LEVEL or header.startswith("lrmoe/v1/")
        if ours and folder and not any(header.startswith(prefix) for prefix in ALLOWED_INCLUDES[folder]):
            yield line, f"{folder} may not include {header}"
        if pure and BANNED_IN_PURE.match(header):
            yield line, f"pure code may not include <{header}>: time, seeds and text come as arguments"
        for pattern, allowed in ONLY_IN:
            if pattern.match(header) and not path.startswith(allowed):
                yield line, f"{header} may only appear in {', '.join(allowed)}"
        if path.startswith("common/") and path.endswith(".h") and HEAVY_IN_COMMON.match(header):
            yield line, f"{header} is too heavy for a header of common"


def check_pure_closure(path, text, texts):
    """What a pure file includes through our headers, at any depth, must be pure too."""
    seen, queue = set(), [(line, header, header) for line, _, header in includes(text)]
    while queue:
        line, first, header = queue.pop()
        if header in seen or header not in texts:
            continue
        seen.add(header)
        for _, _, inner in includes(texts[header]):
            if BANNED_IN_PURE.match(inner):
                yield line, f"{first} brings <{inner}> (through {header}) into pure code"
            queue.append((line, first, inner))


def check_size(path, text):
    limit = MAX_KERNEL_LINES if path.startswith("kernels/") else MAX_LINES
    lines = len(text.splitlines())
    if lines > limit:
        yield 0, f"{lines} lines; at most {limit}: split it"


def check_function_length(path, text):
    """Functions at namespace scope, by our layout: they open with a { at a line's end and close with a } in the first column."""
    if not path.endswith(CXX):
        return
    begin = None  # where the newest line starts that is not indented: the function's name, also of a long signature
    opened = False
    for number, line in enumerate(text.splitlines(), 1):
        if opened:
            if line.startswith("}"):
                if number - begin + 1 > MAX_FUNCTION_LINES and not NO_FUNCTION.match(text.splitlines()[begin - 1]):
                    yield begin, f"{number - begin + 1} lines; a function has at most {MAX_FUNCTION_LINES}: split it"
                opened = False
            continue
        if re.match(r"[A-Za-z_]", line):
            begin = number
        opened = begin is not None and line.endswith("{") and (begin == number or line.startswith("   ")) \
            and not line.startswith(("namespace", "extern"))


def check_pragma_once(path, text):
    if not path.endswith((".h", ".cuh")) or path in INCLUDED_OFTEN:
        return
    for number, line in enumerate(text.splitlines(), 1):
        code = line.strip()
        if code and not code.startswith("//"):
            if code != "#pragma once":
                yield number, "the first line of code of a header is #pragma once"
            return
    yield 0, "the first line of code of a header is #pragma once"


def words(name):
    """"PlanDataStore" -> plan, data, store; "plan_store" -> plan, store."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def banned_name(name):
    """The word of a file or type name that says nothing, or None. "data" may describe (DataType), not be the thing."""
    parts = words(name)
    for word in parts:
        if word in BANNED_WORDS:
            return word
    return "data" if parts and parts[-1] == "data" else None


def check_names(path, text):
    name = path.rsplit("/", 1)[-1]
    if not SNAKE_CASE.match(name) and not SCRIPT_NAME.match(name):
        yield 0, f"file name {name} is not snake_case"
    stem = name.split(".")[0]
    if banned_name(stem):
        yield 0, f"\"{banned_name(stem)}\" in a file name says nothing; name what it is"
    pattern = PYTHON_TYPE if path.endswith(".py") else CXX_TYPE if path.endswith(CXX) else None
    for number, line in enumerate(text.splitlines(), 1):
        match = pattern.match(line) if pattern else None
        if match and banned_name(match.group(1)):
            yield number, f"\"{banned_name(match.group(1))}\" in the name {match.group(1)} says nothing; name what it is"


def check_text(path, text):
    sleepless = path.startswith(("tests/unit/", "tests/contract/", "tests/scenario/")) and path.endswith(CXX)
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield number, f"{UNFINISHED.search(line).group(0)}: finish it, or file it where work is tracked"
        if MACHINE_PATH.search(line):
            yield number, f"a path of one machine: {MACHINE_PATH.search(line).group(0)}..."
        if sleepless and SLEEP.search(line):
            yield number, "tests do not sleep; wait for what should happen, with a deadline"


FILE_CHECKS = [check_includes, check_size, check_function_length, check_pragma_once, check_names, check_text]


def needs_readme(folder):
    """Folders of the first two levels explain themselves and what is below them; proto/ explains its version folders."""
    return folder.count("/") <= 1 and not folder.startswith("proto/")


def check_folders(paths, texts):
    """(path, message) of rules on the tree: fixed top-level folders, a README of bounded length in each."""
    folders = set()
    for path in paths:
        top = path.split("/")[0]
        if "/" in path and top not in TOP_LEVEL and not top.startswith("."):
            yield path, f"the top-level folders are {', '.join(sorted(TOP_LEVEL))}"
        if path.endswith(SOURCES) and "/" in path:
            folder = path.rsplit("/", 1)[0]
            parts = folder.split("/")
            folders.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    for folder in sorted(folders):
        if any(not SNAKE_CASE.match(part) for part in folder.split("/") if not part.startswith(".")):
            yield folder, "folder name is not snake_case"
        if not folder.startswith(".") and needs_readme(folder) and folder + "/README.md" not in texts:
            yield folder, "a folder with sources needs a README.md: purpose, what it may include, what to read first"
    for path, text in sorted(texts.items()):
        if path.endswith("/README.md") and len(text.splitlines()) > MAX_README_LINES:
            yield path, f"{len(text.splitlines())} lines; a folder's README has at most {MAX_README_LINES}"
