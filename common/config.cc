#include "common/config.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "common/config_file.h"
#include "common/status_macros.h"
#include "common/version.h"

namespace lrmoe {
namespace {

constexpr size_t kHelpColumn = 34;
constexpr size_t kHelpWidth = 110;

std::string FlagName(absl::string_view name) {
  return absl::StrCat("--", absl::StrReplaceAll(name, {{"_", "-"}}));
}

std::string VariableName(absl::string_view name) {
  return absl::StrCat("LRMOE_", absl::AsciiStrToUpper(name));
}

// "  left        doc doc doc", the doc wrapped in its own column.
std::string HelpLine(absl::string_view left, absl::string_view doc) {
  std::string out = absl::StrCat("  ", left);
  size_t column = out.size();
  if (column + 2 > kHelpColumn) {
    out.push_back('\n');
    column = 0;
  }
  out.append(kHelpColumn - column, ' ');
  column = kHelpColumn;
  bool first = true;
  for (absl::string_view word : absl::StrSplit(doc, ' ', absl::SkipEmpty())) {
    if (!first && column + 1 + word.size() > kHelpWidth) {
      absl::StrAppend(&out, "\n", std::string(kHelpColumn, ' '));
      column = kHelpColumn;
    } else if (!first) {
      out.push_back(' ');
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
    first = false;
  }
  return out + "\n";
}

}  // namespace

struct Settings::Setting {
  std::string name;
  CustomSetting custom;
  bool quoted = true;  // its value is a string in a configuration file
  bool flag = false;   // the command line may leave the value out
  bool required = false;
  bool given = false;
  std::string default_text;
  std::string origin = "default";

  // `label` names the source in errors, `from` in --print-config.
  absl::Status Apply(absl::string_view text, absl::string_view label, std::string from) {
    const absl::Status status = custom.set(text);
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat(label, ": ", status.message()));
    given = true;
    origin = std::move(from);
    return absl::OkStatus();
  }
};

// What the arguments say, before any of it is applied.
struct Settings::CommandLine {
  std::vector<std::pair<Setting*, std::string>> values;
  std::string config_path;
  bool help = false;
  bool version = false;
  bool print_config = false;
};

Settings::Settings(std::string program, std::string description)
    : program_(std::move(program)), description_(std::move(description)) {}
Settings::~Settings() = default;

void Settings::AddCustom(absl::string_view name, CustomSetting setting) {
  Add(name, std::move(setting), true);
}

void Settings::Add(absl::string_view name, CustomSetting custom, bool quoted, bool flag) {
  LRMOE_CHECK(Find(name) == nullptr && name != "config" && name != "print_config");
  auto setting = std::make_unique<Setting>();
  setting->name = std::string(name);
  setting->default_text = custom.text();
  setting->custom = std::move(custom);
  setting->quoted = quoted;
  setting->flag = flag;
  settings_.push_back(std::move(setting));
}

void Settings::Require(absl::string_view name) {
  Setting* setting = Find(name);
  LRMOE_CHECK(setting != nullptr);
  setting->required = true;
}

void Settings::AllowCommand(std::vector<std::string>* target, absl::string_view doc) {
  command_ = target;
  command_doc_ = std::string(doc);
}

Settings::Setting* Settings::Find(absl::string_view name) {
  for (const auto& setting : settings_)
    if (setting->name == name) return setting.get();
  return nullptr;
}

std::string Settings::KnownNames() const {
  return absl::StrJoin(settings_, ", ",
                       [](std::string* out, const auto& setting) { out->append(setting->name); });
}

// CLI11 splits the command line; it does not see environment or file, because it would let the file win.
absl::Status Settings::ReadFlags(const std::vector<std::string>& arguments, CommandLine& line) {
  const auto separator = std::find(arguments.begin(), arguments.end(), "--");
  if (separator != arguments.end()) {
    if (command_ == nullptr) return absl::InvalidArgumentError("this program takes no command after --");
    if (separator + 1 == arguments.end()) return absl::InvalidArgumentError("no command after --");
    command_->assign(separator + 1, arguments.end());
  }
  CLI::App app;
  app.set_help_flag();
  app.add_flag("--help,-h", line.help);
  app.add_flag("--version", line.version);
  app.add_flag("--print-config", line.print_config);
  app.add_option("--config", line.config_path);
  std::vector<std::string> texts(settings_.size());
  std::vector<CLI::Option*> options;
  for (size_t idx = 0; idx < settings_.size(); ++idx) {
    const std::string flag = FlagName(settings_[idx]->name);
    options.push_back(settings_[idx]->flag ? app.add_flag(flag, texts[idx])
                                           : app.add_option(flag, texts[idx]));
  }
  std::vector<std::string> reversed(std::make_reverse_iterator(separator), arguments.rend());
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  for (size_t idx = 0; idx < settings_.size(); ++idx)
    if (options[idx]->count() > 0) line.values.emplace_back(settings_[idx].get(), texts[idx]);
  return absl::OkStatus();
}

absl::Status Settings::ApplyFile(const std::string& path) {
  LRMOE_ASSIGN_OR_RETURN(const std::vector<ConfigFileEntry> entries, ReadConfigFile(path));
  for (const ConfigFileEntry& entry : entries) {
    const std::string place = absl::StrCat(path, ":", entry.line);
    Setting* setting = Find(entry.key);
    if (setting == nullptr)
      return absl::InvalidArgumentError(
          absl::StrCat(place, ": unknown key \"", entry.key, "\"; known: ", KnownNames()));
    LRMOE_RETURN_IF_ERROR(setting->Apply(entry.value, place, absl::StrCat("file ", place)));
  }
  return absl::OkStatus();
}

absl::Status Settings::ApplyEnvironment(const std::function<const char*(const char*)>& environment) {
  for (const auto& setting : settings_) {
    const std::string variable = VariableName(setting->name);
    const char* value = environment(variable.c_str());
    if (value == nullptr || *value == '\0') continue;
    LRMOE_RETURN_IF_ERROR(setting->Apply(value, variable, absl::StrCat("env ", variable)));
  }
  return absl::OkStatus();
}

absl::Status Settings::ApplyFlags(const CommandLine& line) {
  for (const auto& [setting, text] : line.values) {
    const std::string flag = FlagName(setting->name);
    LRMOE_RETURN_IF_ERROR(setting->Apply(text, flag, absl::StrCat("flag ", flag)));
  }
  return absl::OkStatus();
}

absl::Status Settings::CheckRequired() const {
  for (const auto& setting : settings_)
    if (setting->required && !setting->given)
      return absl::InvalidArgumentError(
          absl::StrCat(setting->name, " is not set; give ", FlagName(setting->name), ", ",
                       VariableName(setting->name), " or ", setting->name, " in the --config file"));
  return absl::OkStatus();
}

absl::StatusOr<std::string> Settings::ParseFrom(const std::vector<std::string>& arguments,
                                                const std::function<const char*(const char*)>& environment) {
  CommandLine line;
  LRMOE_RETURN_IF_ERROR(ReadFlags(arguments, line));
  if (line.help) return Help();
  if (line.version) return absl::StrCat(program_, " ", Version(), "\n");
  if (const char* path = environment("LRMOE_CONFIG"); line.config_path.empty() && path != nullptr)
    line.config_path = path;
  if (!line.config_path.empty()) LRMOE_RETURN_IF_ERROR(ApplyFile(line.config_path));
  LRMOE_RETURN_IF_ERROR(ApplyEnvironment(environment));
  LRMOE_RETURN_IF_ERROR(ApplyFlags(line));
  if (line.print_config) return PrintConfig();
  LRMOE_RETURN_IF_ERROR(CheckRequired());
  return std::string();
}

std::optional<int> Settings::Parse(int argc, const char* const* argv) {
  const std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  const absl::StatusOr<std::string> printed =
      ParseFrom(arguments, [](const char* variable) -> const char* { return std::getenv(variable); });
  if (!printed.ok()) {
    const std::string message(printed.status().message());
    std::fprintf(stderr, "%s: %s\nRun %s --help for the settings.\n", program_.c_str(), message.c_str(),
                 program_.c_str());
    return kExitUsage;
  }
  if (printed->empty()) return std::nullopt;
  std::fputs(printed->c_str(), stdout);
  return std::fflush(stdout) == 0 ? kExitDone : kExitFailed;
}

std::string Settings::PrintConfig() const {
  std::string out;
  for (const auto& setting : settings_) {
    const std::string text = setting->custom.text();
    absl::StrAppend(&out, setting->name, " = ", setting->quoted ? QuoteConfigString(text) : text, "  # ",
                    setting->origin, "\n");
  }
  return out;
}

std::string Settings::Help() const {
  std::string out = absl::StrCat(program_, " ", Version(), ": ", description_, "\n\nUsage: ", program_,
                                 " [settings]", command_ ? " [-- command...]" : "", "\n\n");
  absl::StrAppend(
      &out, "Settings are taken from the flag, else the environment, else the --config file, else the\n",
      "default. The flag --some-name is the variable LRMOE_SOME_NAME and the file key some_name.\n\n");
  for (const auto& setting : settings_) {
    const std::string left = absl::StrCat(FlagName(setting->name), setting->flag ? "" : " ",
                                          setting->flag ? "" : setting->custom.placeholder);
    const std::string ending = setting->required ? " (required)"
                               : setting->default_text.empty()
                                   ? ""
                                   : absl::StrCat(" [", setting->default_text, "]");
    absl::StrAppend(&out, HelpLine(left, setting->custom.doc + ending));
  }
  absl::StrAppend(
      &out, HelpLine("--config FILE", "Read settings from a file of `key = value` lines (LRMOE_CONFIG)."),
      HelpLine("--print-config", "Print every setting and where its value came from, and end."),
      HelpLine("--version", "Print the version, and end."),
      HelpLine("--help, -h", "Print this text, and end."));
  if (command_) absl::StrAppend(&out, HelpLine("-- command...", command_doc_));
  return out;
}

}  // namespace lrmoe
