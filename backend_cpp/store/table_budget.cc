// Budgets of tables as operators write them.
#include <charconv>
#include <sstream>

#include "embertide/store.h"

namespace embertide {

Result<std::map<std::string, TableBudget>> ParseTableBudgets(const std::string& text) {
  std::map<std::string, TableBudget> budgets;
  std::istringstream all(text);
  for (std::string part; std::getline(all, part, ',');) {
    const auto wrong = [&](const std::string& why) {
      std::string message = "table budget \"";
      return Status(Code::kInvalidArgument, message.append(part).append("\" ").append(why));
    };
    const size_t equals = part.find('=');
    if (equals == std::string::npos) {
      return wrong("is not TABLE=DDR_BYTES[/SSD_BYTES[/POLICY]]");
    }
    TableBudget budget;
    std::istringstream values(part.substr(equals + 1));
    std::string value;
    for (uint64_t* const bytes : {&budget.ddr_bytes, &budget.ssd_bytes}) {
      if (!std::getline(values, value, '/')) break;
      const char* const end = value.data() + value.size();
      const auto [stop, error] = std::from_chars(value.data(), end, *bytes);
      if (error != std::errc() || stop != end) return wrong("has \"" + value + "\" for bytes");
    }
    if (std::getline(values, value)) budget.ddr_policy = value;
    if (!budgets.emplace(part.substr(0, equals), budget).second) {
      return wrong("is the second one of its table");
    }
  }
  return budgets;
}

}  // namespace embertide
