// The extension module vishwamai.core._cpu: the FFI handlers as capsules, and what was detected.
#include <Python.h>

#include "isa.h"
#include "parallel.h"
#include "placement.h"
#include "registry.h"

namespace {

PyObject* registrations(PyObject*, PyObject*) {
  PyObject* handlers = PyDict_New();
  for (const vishwamai::Handler* h = vishwamai::Handler::list(); handlers && h; h = h->next) {
    PyObject* capsule = PyCapsule_New(h->function, nullptr, nullptr);
    if (!capsule || PyDict_SetItemString(handlers, h->name, capsule) < 0) Py_CLEAR(handlers);
    Py_XDECREF(capsule);
  }
  return handlers;
}
PyObject* text(const char* s) {
  if (s) return PyUnicode_FromString(s);
  Py_RETURN_NONE;
}
PyObject* isa(PyObject*, PyObject*) { return text(vishwamai::isa_name(vishwamai::isa())); }
PyObject* best_isa(PyObject*, PyObject*) { return text(vishwamai::isa_name(vishwamai::best_isa())); }
PyObject* isa_complaint(PyObject*, PyObject*) { return text(vishwamai::isa_complaint()); }
PyObject* thread_limit(PyObject*, PyObject*) { return PyLong_FromLong(vishwamai::thread_limit()); }

// A sequence of sequences of processors.
PyObject* set_nodes(PyObject*, PyObject* nodes) {
  std::vector<std::vector<int>> processors;
  const Py_ssize_t count = PySequence_Size(nodes);
  for (Py_ssize_t n = 0; n < count; ++n) {
    PyObject* node = PySequence_GetItem(nodes, n);
    processors.emplace_back();
    const Py_ssize_t size = node ? PySequence_Size(node) : -1;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* processor = PySequence_GetItem(node, i);
      const long value = processor ? PyLong_AsLong(processor) : -1;
      Py_XDECREF(processor);
      if (value >= 0) processors.back().push_back(static_cast<int>(value));
    }
    Py_XDECREF(node);
  }
  if (PyErr_Occurred()) return nullptr;
  vishwamai::set_nodes(std::move(processors));
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"registrations", registrations, METH_NOARGS, "{name: capsule} of every FFI handler."},
    {"isa", isa, METH_NOARGS, "Name of the instruction set in use."},
    {"best_isa", best_isa, METH_NOARGS, "Name of the greatest instruction set of this machine and this build."},
    {"isa_complaint", isa_complaint, METH_NOARGS, "What was wrong with VISHWAMAI_CPU_ISA, or None."},
    {"set_nodes", set_nodes, METH_O, "Says which processors each memory node has."},
    {"thread_limit", thread_limit, METH_NOARGS, "The most threads that a kernel uses."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", "Native CPU kernels behind XLA's foreign function interface.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() {
  vishwamai::keep_freed_memory();
  return PyModule_Create(&definition);
}
