// Memory of the host that several processes map: anonymous, so that it goes with the last of them however they end, and
// not in /dev/shm, which containers often keep small.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace fc::cuda {

class HostMemory {
 public:
  HostMemory() = default;
  HostMemory(HostMemory&& other) noexcept { swap(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    HostMemory taken(std::move(other));
    swap(taken);
    return *this;
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() {
    if (data_ != nullptr) (void)munmap(data_, static_cast<size_t>(bytes_));
    if (file_ >= 0) (void)::close(file_);
  }

  // Filled with zeros. Throws std::runtime_error, as `open` does.
  static HostMemory create(int64_t bytes) {
    HostMemory made;
    made.file_ = memfd_create("fc_eval", MFD_CLOEXEC);
    if (made.file_ < 0 || ftruncate(made.file_, bytes) != 0) fail("shared memory of the host cannot be allocated");
    made.map(bytes);
    return made;
  }
  // What another process of this user on this machine has created and called `name`.
  static HostMemory open(const std::string& name, int64_t bytes) {
    HostMemory made;
    made.file_ = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
    if (made.file_ < 0) fail("its memory of the host cannot be opened (other machine, user or container?)");
    if (lseek(made.file_, 0, SEEK_END) != bytes) throw std::runtime_error("its memory of the host has another size");
    made.map(bytes);
    return made;
  }

  explicit operator bool() const { return data_ != nullptr; }
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  std::string name() const { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_); }

 private:
  [[noreturn]] static void fail(const char* what) {
    throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
  }
  void map(int64_t bytes) {
    void* at = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (at == MAP_FAILED) fail("shared memory of the host cannot be mapped");
    data_ = static_cast<uint8_t*>(at);
    bytes_ = bytes;
  }
  void swap(HostMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(file_, other.file_);
  }

  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  int file_ = -1;
};

}  // namespace fc::cuda
