// Whether this machine's cores have nothing better to do, as the kernel counts it.
#pragma once

#include <string>

namespace tf {

class IdleCores {
 public:
  // `num_cores` are those that this process may use. `load_file` reads as /proc/loadavg does; where
  // there is none, no core is ever idle.
  IdleCores(int num_cores, const std::string& load_file);
  ~IdleCores();
  IdleCores(const IdleCores&) = delete;
  IdleCores& operator=(const IdleCores&) = delete;

  // By how much the threads that run or wait to, the caller's among them, outnumber the cores; 0 when
  // they do not. Costs one system call. May be called on several threads at once.
  int num_missing() const;

 private:
  int num_cores_;
  int file_;
};

}  // namespace tf
