// Writes JSON.
#pragma once

#include <string>
#include <type_traits>

namespace flash_cute {

inline void append(std::string& items, const std::string& item) {
  items += items.empty() ? item : ", " + item;
}

inline std::string in_brackets(const std::string& items) { return "[" + items + "]"; }

class JsonObject {
 public:
  JsonObject& add(const char* name, const std::string& text) {
    return add_json(name, "\"" + text + "\"");
  }
  template <class Number>
    requires std::is_arithmetic_v<Number>
  JsonObject& add(const char* name, Number value) {
    return add_json(name, std::to_string(value));
  }
  JsonObject& add_json(const char* name, const std::string& value) {
    append(fields_, "\"" + std::string(name) + "\": " + value);
    return *this;
  }
  std::string str() const { return "{" + fields_ + "}"; }

 private:
  std::string fields_;
};

}  // namespace flash_cute
