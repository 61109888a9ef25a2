// The extension module vishwamai.core._cpu: the FFI handlers as capsules, and what was detected.
#include <nanobind/nanobind.h>

#include "isa.h"
#include "parallel.h"
#include "registry.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  vishwamai::keep_freed_memory();
  m.doc() = "Native CPU kernels behind XLA's foreign function interface.";
  m.def("registrations", [] {
    nb::dict handlers;
    for (const vishwamai::Handler* h = vishwamai::Handler::list(); h != nullptr; h = h->next) {
      handlers[h->name] = nb::capsule(h->function);
    }
    return handlers;
  });
  m.def("isa", [] { return vishwamai::isa_name(vishwamai::isa()); });
  m.def("best_isa", [] { return vishwamai::isa_name(vishwamai::best_isa()); });
  m.def("isa_complaint", []() -> nb::object {
    const char* complaint = vishwamai::isa_complaint();
    return complaint ? nb::cast(complaint) : nb::none();
  });
  m.def("thread_limit", &vishwamai::thread_limit);
}
