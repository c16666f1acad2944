// A file that is held open is read when its name is gone, or is another file's.
#include "base/file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace embertide {
namespace {

void Write(const std::string& path, const std::string& text) {
  ASSERT_TRUE(WriteFileAtomically(path, std::as_bytes(std::span(text))).ok());
}

TEST(HeldFileTest, IsReadWhenItsNameIsGone) {
  const std::string path = testing::TempDir() + "/held";
  Write(path, "first");
  auto held = HeldFile::Open(path);
  ASSERT_TRUE(held.ok());
  Write(path, "second");
  EXPECT_EQ(ReadWholeFile((*held)->path(), 100).value(), "first");
  std::filesystem::remove(path);
  EXPECT_EQ(ReadWholeFile((*held)->path(), 100).value(), "first");
}

TEST(HeldFileTest, OneThatIsNotThereIsNamed) {
  const auto held = HeldFile::Open("/none/there");
  EXPECT_EQ(held.status().code(), Code::kNotFound);
  EXPECT_NE(held.status().message().find("/none/there"), std::string::npos);
}

}  // namespace
}  // namespace embertide
