// write_options FILE: writes embertide/settings.h, the options of options.proto as structs of C++,
// their defaults, and a walk over them. Runs when the C++ is built.
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

#include "embertide/v1/options.pb.h"

namespace {

using embertide::v1::NodeOptions;
using embertide::v1::Setting;
using google::protobuf::FieldDescriptor;

constexpr const char* kHead =
    R"(// Generated from proto/embertide/v1/options.proto, as docs/serving.md is.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <type_traits>

#include "embertide/hbm.h"
#include "embertide/setting.h"
#include "embertide/ssd.h"
#include "embertide/store.h"

namespace embertide {
)";

const Setting& SettingOf(const FieldDescriptor& field) {
  return field.options().GetExtension(embertide::v1::setting);
}

std::string Quoted(const std::string& text) { return "\"" + text + "\""; }

// The name of the field in C++: a duration has its unit in its type.
std::string MemberName(const FieldDescriptor& field) {
  std::string name = field.name();
  if (SettingOf(field).unit() == embertide::v1::UNIT_MILLISECONDS) name.resize(name.size() - 3);
  return name;
}

// A text's type, and where it has a parser its default.
std::string TextMember(const FieldDescriptor& field) {
  const std::string& parser = SettingOf(field).parser();
  const bool has_default = field.has_default_value();
  const std::string text = has_default ? Quoted(field.default_value_string()) : "";
  if (parser.empty()) {
    return "std::string " + field.name() + (has_default ? " = " + text : "") + ";";
  }
  return "ParsedBy<" + parser + "> " + field.name() +
         (has_default ? " = *" + parser + "(" + text + ")" : "") + ";";
}

std::string NumberMember(const FieldDescriptor& field, const std::string& type, uint64_t value) {
  const std::string text = std::to_string(value);
  if (SettingOf(field).unit() == embertide::v1::UNIT_MILLISECONDS) {
    return "std::chrono::milliseconds " + MemberName(field) + "{" + text + "};";
  }
  return type + " " + field.name() + " = " + text + ";";
}

// The declaration of a field; empty: C++ has no options of its type.
std::string Member(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return TextMember(field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return "bool " + field.name() + (field.default_value_bool() ? " = true;" : " = false;");
    case FieldDescriptor::CPPTYPE_UINT32:
      return NumberMember(field, "uint32_t", field.default_value_uint32());
    case FieldDescriptor::CPPTYPE_UINT64:
      return NumberMember(field, "uint64_t", field.default_value_uint64());
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      std::ostringstream value;
      value << field.default_value_double();
      return "double " + field.name() + " = " + value.str() + ";";
    }
    default:
      return "";
  }
}

// The call that shows the field to who walks over the settings.
std::string Visit(const FieldDescriptor& field) {
  const Setting& setting = SettingOf(field);
  std::ostringstream out;
  out << "  visit(Setting{.name = " << Quoted(field.name());
  if (setting.min() > 0) out << ", .min = " << setting.min() << "ULL";
  if (setting.max() > 0) out << ", .max = " << setting.max() << "ULL";
  if (setting.format() == embertide::v1::FORMAT_PATH) out << ", .is_path = true";
  if (field.is_repeated()) out << ", .is_list = true";
  out << "}, ";
  if (!setting.parser().empty()) out << setting.parser() << ", ";
  out << "&settings->" << MemberName(field) << ");\n";
  return out.str();
}

// One struct and its walk; `wrong` gets the name of a field that cannot be written.
std::string Struct(const std::string& name, bool of_requests, std::string* wrong) {
  std::string members;
  std::string visits;
  for (int i = 0; i < NodeOptions::descriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *NodeOptions::descriptor()->field(i);
    if (SettingOf(field).of_requests() != of_requests) continue;
    const std::string member = Member(field);
    if (member.empty() || SettingOf(field).help().empty()) *wrong = field.name();
    members.append("  // ").append(SettingOf(field).help()).append("\n");
    members.append("  ").append(member).append("\n");
    visits += Visit(field);
  }
  return "\nstruct " + name + " {\n" + members + "};\n\n// Shows `visit` every setting: its " +
         "Setting, its parser if it has one, and where it is.\ntemplate <typename Visit>\n" +
         "void ForEachSetting(" + name + "* settings, Visit visit) {\n" + visits + "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "write_options FILE\n";
    return 2;
  }
  std::string wrong;
  const std::string structs =
      Struct("NodeSettings", false, &wrong) + Struct("ModelSettings", true, &wrong);
  if (!wrong.empty()) {
    std::cerr << "options.proto: " << wrong
              << " has no help, or a type that is no string, bool, uint32, uint64 or double\n";
    return 1;
  }
  std::ofstream out(argv[1]);
  out << kHead << structs << "\n}  // namespace embertide\n";
  return out.flush() ? 0 : 1;
}
