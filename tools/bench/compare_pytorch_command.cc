// lrmoe-bench compare-pytorch: hands over to compare_pytorch.py, which lies beside the programs.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "tools/bench/commands.h"

namespace lrmoe::bench {
namespace {

int Run(const std::vector<std::string>& arguments) {
  std::error_code error;
  const std::filesystem::path bin = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  const std::string script = bin / "../share/lrmoe/compare_pytorch.py";
  if (error || !std::filesystem::exists(script)) {
    std::cerr << "lrmoe-bench compare-pytorch: " << script << " is missing\n";
    return 1;
  }
  const char* python = std::getenv("LRMOE_PYTHON");
  std::vector<std::string> words = {python != nullptr ? python : "python3", script, "--bin", bin};
  words.insert(words.end(), arguments.begin(), arguments.end());
  // The package that was built with these programs.
  const char* before = std::getenv("PYTHONPATH");
  setenv("PYTHONPATH",
         ((bin / "../python").string() + (before != nullptr ? ":" + std::string(before) : "")).c_str(), 1);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  std::cerr << "lrmoe-bench compare-pytorch: " << words[0] << ": " << std::strerror(errno) << "\n";
  return 1;
}

}  // namespace

void AddComparePytorchCommand(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand(
      "compare-pytorch", "A layer by PyTorch, Hugging Face and lrmoe side by side; --help of its own");
  command->prefix_command();  // what follows is the script's
  command->set_help_flag();
  command->callback([command, &exit_code] { exit_code = Run(command->remaining()); });
}

}  // namespace lrmoe::bench
