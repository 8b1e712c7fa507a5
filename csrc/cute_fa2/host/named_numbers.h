// Reads "name=number,name=number".
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_cute {

// Calls take(name, number) for each item; it returns whether it knows the name. `what`: what a
// refusal calls the text, and `names`: the names that are allowed.
template <class Take>
void read_named_numbers(const std::string& text, const std::string& what, const std::string& names,
                        const Take& take) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = std::min(item.find('='), item.size());
    const char* last = item.data() + item.size();
    int64_t number = 0;
    const auto [read, error] =
        std::from_chars(std::min(item.data() + equals + 1, last), last, number);
    if (equals == item.size() || error != std::errc() || read != last) {
      throw std::runtime_error("flash_cute: " + what + " has '" + item +
                               "': it must be name=number, a whole number of 64 bits");
    }
    const std::string name = item.substr(0, equals);
    if (!take(name, number)) {
      throw std::runtime_error("flash_cute: " + what + " has '" + name + "': it must be " + names);
    }
  }
}

}  // namespace flash_cute
