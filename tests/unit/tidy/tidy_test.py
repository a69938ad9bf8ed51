#!/usr/bin/env python3
"""The house-rules checker on small trees: it accepts a clean one and names each breach with its place."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "tidy"))
sys.dont_write_bytecode = True
import rules  # noqa: E402
import tidy  # noqa: E402

CLEAN = {
    "CMakeLists.txt": "",
    "README.md": "long\n" * 100,
    "common/README.md": "# common\n",
    "common/ids.h": "// Ids.\n#pragma once\n#include <cstdint>\n",
    "controller/README.md": "# controller\n",
    "controller/planner/README.md": "# planner\n",
    "controller/planner/planner.h": '#pragma once\n#include "common/ids.h"\nstruct DataSource {};\n',
    "controller/planner/policies/fixed.cc": '#include "controller/planner/planner.h"\n',
    "worker/README.md": "# worker\n",
    "worker/transport/README.md": "# transport\n",
    "worker/transport/mpi.cc": "#include <mpi.h>\n",
    "kernels/README.md": "# kernels\n",
    "kernels/gemm.cc": "int x;\n" * 600,
    "common/ids.cc": "namespace lrmoe {\nint Long() {\n" + "  Next();\n" * 68 + "}\n\nstruct Wide {\n" + "  int x;\n" * 80 + "};\n}\n",
}
FORBIDDEN_WORD = "TO" + "DO"

# (file, its text, the line and a part of the message expected)
BREACHES = [
    ("common/ids.h", '#pragma once\n#include "controller/planner/planner.h"\n', "2: common may not include controller/"),
    ("controller/planner/planner.h", '#pragma once\n#include "worker/transport/transport.h"\n',
     "2: controller/planner may not include worker/transport/transport.h"),
    ("controller/planner/planner.h", "#pragma once\n#include <thread>\n", "2: pure code may not include <thread>"),
    ("controller/planner/planner.h", "#pragma once\n  #  include <chrono>\n", "2: pure code may not include <chrono>"),
    ("controller/planner/policies/fixed.cc", "#include <unordered_map>\n", "1: pure code may not include <unordered_map>"),
    ("controller/core/core.cc", "#include <spdlog/spdlog.h>\n", "1: pure code may not include <spdlog/spdlog.h>"),
    ("controller/core/core.cc", '#include "lrmoe/v1/admin.pb.h"\n', "1: controller/core may not include lrmoe/v1/admin.pb.h"),
    ("worker/agent/agent.cc", '#include "common/logging.h"\n', "1: pure code may not include <common/logging.h>"),
    ("common/ids.h", "#pragma once\n#include <fstream>\n", "brings <fstream> (through common/ids.h) into pure code"),
    ("common/ids.h", '#pragma once\n#include <nlohmann/json.hpp>\n', "2: nlohmann/json.hpp is too heavy"),
    ("controller/server.cc", "#include <sqlite3.h>\n", "1: sqlite3.h may only appear in controller/store/"),
    ("worker/engine/engine.cc", "#include <mpi.h>\n", "1: mpi.h may only appear in worker/transport/mpi.cc"),
    ("worker/engine/engine.cc", '#include "controller/planner/planner.h"\n', "1: worker/engine may not include controller/"),
    ("worker/engine/engine.cc", "#include <nccl.h>\n", "1: nccl.h may only appear in worker/transport/nccl.cc"),
    ("worker/engine/engine.cc", "#include <dnnl.hpp>\n", "1: dnnl.hpp may only appear in"),
    ("kernels/gemm.cc", '#include "common/ids.h"\n', "1: kernels may not include common/ids.h"),
    ("kernels/gemm.cc", "int x;\n" * 601, "601 lines; at most 600"),
    ("common/ids.cc", "int x;\n" * 451, "451 lines; at most 450"),
    ("common/ids.cc", "int Long(int a,\n         int b) {\n" + "  a += b;\n" * 68 + "}\n", "1: 71 lines; a function has at most 70"),
    ("tools/lrmoectl/cli.cc", '#include "controller/core/core.h"\n', "1: tools/lrmoectl may not include controller/"),
    ("common/ids.h", "// Ids.\n#include <cstdint>\n#pragma once\n", "2: the first line of code of a header is #pragma once"),
    ("common/ids.h", "// Ids.\n", "the first line of code of a header is #pragma once"),
    ("common/plan_utils.cc", "", '"utils" in a file name'),
    ("common/plan_data.cc", "", '"data" in a file name'),
    ("common/PlanText.cc", "", "PlanText.cc is not snake_case"),
    ("common/plan-text.py", "", "plan-text.py is not snake_case"),
    ("common/ids.cc", "\nclass PlanManager {\n", '2: "manager" in the name PlanManager'),
    ("common/ids.cc", "enum class HelperKind {\n", '1: "helper" in the name HelperKind'),
    ("common/ids.cc", "struct PlanData {\n", '1: "data" in the name PlanData'),
    ("tools/python/lrmoe/x.py", "class Util:\n", '1: "util" in the name Util'),
    ("common/ids.cc", f"int x;  // {FORBIDDEN_WORD}: y\n", f"1: {FORBIDDEN_WORD}"),
    ("common/ids.cc", '\nconst char* p = "/ho' + 'me/someone/x";\n', "2: a path of one machine"),
    ("common/README.md", "line\n" * 41, "41 lines; a folder's README has at most 40"),
    ("common/README.md", None, "common: a folder with sources needs a README.md"),
    ("deploy/quickstart.sh", "", "deploy: a folder with sources needs a README.md"),
    ("extras/x.cc", "", "extras/x.cc: the top-level folders are"),
    ("common/Deep/x.cc", "", "common/Deep: folder name is not snake_case"),
    ("tests/unit/x/x_test.cc", "void F() { std::this_thread::sleep_for(x); }\n", "1: tests do not sleep"),
]


def run_on(files):
    """(exit status, output) of the checker on a tree of these files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            if text is None:
                continue
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = tidy.main([folder])
        return status, output.getvalue()


class TidyTest(unittest.TestCase):
    def test_a_clean_tree_passes(self):
        status, output = run_on(CLEAN)
        self.assertEqual((status, output), (0, f"0 breaches of the house rules in {len(CLEAN)} files\n"))

    def test_each_breach_is_named(self):
        for name, text, expected in BREACHES:
            with self.subTest(file=name, expected=expected):
                status, output = run_on({**CLEAN, name: text})
                self.assertEqual(status, 1, output)
                self.assertIn(expected, output)
                self.assertIn(name.rsplit("/", 1)[0] if text is None else name.split("/")[0], output)

    def test_usage(self):
        self.assertEqual(run_on({"x.cc": ""})[0], 2)

    def test_words_of_names(self):
        self.assertEqual(rules.words("PlanDataStore"), ["plan", "data", "store"])
        self.assertEqual(rules.words("MPIUtil2"), ["mpi", "util2"])
        self.assertEqual(rules.words("plan_store"), ["plan", "store"])
        self.assertIsNone(rules.banned_name("DataType"))
        self.assertIsNone(rules.banned_name("utility_row"))
        self.assertEqual(rules.banned_name("HelperKind"), "helper")


if __name__ == "__main__":
    unittest.main()
