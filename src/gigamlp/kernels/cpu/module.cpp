// The Python module `_native`, in CPython's limited API: one binary for every Python from 3.11 on.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <stdexcept>

#include "cascade.h"
#include "model.h"

using namespace gigamlp;

namespace {

struct Object {
  PyObject_HEAD
  Model* model;
  PyObject* labels;  // tuple: what `one` answers with; null: class ids
  PyObject* other;   // what `one` calls with a row that it does not take; null: that is an error
};

// A view of an object's memory, released at the end of its scope.
class View {
 public:
  View(PyObject* object, int flags) : ok_(PyObject_GetBuffer(object, &view_, flags) == 0) {}
  ~View() {
    if (ok_) PyBuffer_Release(&view_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  explicit operator bool() const { return ok_; }
  const Py_buffer* operator->() const { return &view_; }

 private:
  Py_buffer view_{};
  bool ok_;
};

bool holds(const View& view, int64_t input) {
  const char* format = view->format ? view->format : "B";
  if (*format == '=' || *format == '@') format++;
  const char* wanted = input == kUint8 ? "B" : input == kInt8 ? "b" : input == kFloat32 ? "f" : "e";
  return *format == *wanted && format[1] == 0;
}

const char* const kOtherRows = "rows of another type or width, or whose values do not lie side by side";

bool takes(const View& x, const Net& net) {
  return x->ndim == 2 && x->shape[1] == net.features && holds(x, net.input) &&
         (x->strides[1] == x->itemsize || net.features == 1);
}

PyObject* refuse(const char* what) {
  PyErr_SetString(PyExc_ValueError, what);
  return nullptr;
}

Model* model_of(PyObject* self) {
  Model* model = ((Object*)self)->model;
  if (!model) PyErr_SetString(PyExc_ValueError, "this network was not made by its constructor");
  return model;
}

// A row that `one` does not take: `other` has the answer, or a better error.
PyObject* hand_over(const Object* object, PyObject* row) {
  if (!object->other) return PyErr_Occurred() ? nullptr : refuse("a row of another type or length");
  PyErr_Clear();
  return PyObject_CallFunctionObjArgs(object->other, row, nullptr);
}

// one(row) -> label: class ids only, no checks but of the row's type and length
PyObject* one(PyObject* self, PyObject* row) {
  const Object* object = (Object*)self;
  const Model* model = object->model;
  if (!model || model->net().output != kClass) return refuse("this network does not answer with classes");
  View x(row, PyBUF_ND | PyBUF_FORMAT);
  if (!x || x->ndim != 1 || x->shape[0] != model->net().features || !holds(x, model->net().input))
    return hand_over(object, row);
  int64_t id = 0;
  model->run_one(Job{(const uint8_t*)x->buf, 0, &id, nullptr});
  if (!object->labels) return PyLong_FromLongLong(id);
  PyObject* label = PyTuple_GetItem(object->labels, (Py_ssize_t)id);
  Py_XINCREF(label);
  return label;
}

PyObject* set_other(PyObject* self, PyObject* callable) {
  Object* object = (Object*)self;
  PyObject* old = object->other;
  Py_INCREF(callable);
  object->other = callable;
  Py_XDECREF(old);
  Py_RETURN_NONE;
}

// run(x, out, margin or None, threads): x [n, features] with any distance from row to row; out and margin contiguous
PyObject* run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Model* model = model_of(self);
  if (!model) return nullptr;
  if (count != 4) return refuse("run takes x, out, margin and threads");
  const Net& net = model->net();
  const long threads = PyLong_AsLong(args[3]);
  if (threads == -1 && PyErr_Occurred()) return nullptr;
  View x(args[0], PyBUF_STRIDES | PyBUF_FORMAT);
  if (!x) return nullptr;
  if (!takes(x, net)) return refuse(kOtherRows);
  const int64_t rows = x->shape[0];
  View out(args[1], PyBUF_ND | PyBUF_WRITABLE);
  if (!out) return nullptr;
  const int64_t wanted = model->width() ? rows * model->width() * 4 : rows * 8;
  if (out->len != wanted) return refuse("`out` has another size than the answers");
  Job job{(const uint8_t*)x->buf, x->strides[0], out->buf, nullptr};
  if (net.output == kMargin) {
    View margin(args[2], PyBUF_ND | PyBUF_WRITABLE);
    if (!margin) return nullptr;
    if (margin->len != rows * 4) return refuse("`margin` has another size than the answers");
    job.margin = (float*)margin->buf;
    Py_BEGIN_ALLOW_THREADS;
    model->run(job, rows, (int)threads);
    Py_END_ALLOW_THREADS;
  } else if (rows <= 16) {  // letting others run would take longer
    model->run(job, rows, 1);
  } else {
    Py_BEGIN_ALLOW_THREADS;
    model->run(job, rows, (int)threads);
    Py_END_ALLOW_THREADS;
  }
  Py_RETURN_NONE;
}

// measure() -> ((fixed, slope) of a list for each row, the same of one for several, us of a block, rows for threads)
PyObject* measure(PyObject* self, PyObject*) {
  Model* model = model_of(self);
  if (!model) return nullptr;
  model->measure();
  const Net& net = model->net();
  return Py_BuildValue("(dd)(dd)dL", net.ways[0].fixed, net.ways[0].slope, net.ways[1].fixed, net.ways[1].slope,
                       net.block_us, (long long)model->parallel_rows());
}

// set_ways(fixed, slope, fixed, slope): see Way in net.h
PyObject* set_ways(PyObject* self, PyObject* args) {
  Model* model = model_of(self);
  Way apiece{}, together{};
  if (!model || !PyArg_ParseTuple(args, "dddd", &apiece.fixed, &apiece.slope, &together.fixed, &together.slope))
    return nullptr;
  model->set_ways(apiece, together);
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* isa = nullptr;
  PyObject *numbers = nullptr, *bytes = nullptr, *labels = nullptr;
  if (!PyArg_ParseTuple(args, "sOOO", &isa, &numbers, &bytes, &labels)) return nullptr;
  View header(numbers, PyBUF_SIMPLE), blob(bytes, PyBUF_SIMPLE);
  if (!header || !blob) return nullptr;
  if (labels != Py_None && !PyTuple_Check(labels)) return refuse("labels are a tuple or None");
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (!self) return nullptr;
  Object* object = (Object*)self;
  try {
    object->model = new Model(isa, (const int64_t*)header->buf, (size_t)header->len / 8, (const uint8_t*)blob->buf,
                              (size_t)blob->len);
    const Net& net = object->model->net();
    if (labels != Py_None) {
      const int64_t classes = net.head == kSigmoid ? 2 : net.layers[net.depth - 1].out;
      if (PyTuple_Size(labels) != classes) throw std::invalid_argument("one label for each class");
      Py_INCREF(labels);
      object->labels = labels;
    }
    return self;
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  Py_DECREF(self);
  return nullptr;
}

void drop(PyObject* self) {
  Object* object = (Object*)self;
  PyTypeObject* type = Py_TYPE(self);
  delete object->model;
  Py_XDECREF(object->labels);
  Py_XDECREF(object->other);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (int i = 0; list && i < isa_count(); i++) {
    const Choice c = isa_at(i);
    PyObject* item = Py_BuildValue("szLLLLL", c.isa->name, c.missing, (long long)c.isa->lanes,
                                   (long long)c.isa->dense_span, (long long)c.isa->step, (long long)c.isa->skips, (long long)c.isa->exact_bits);
    if (!item || PyList_Append(list, item) != 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

// cascade(others, thresholds, x, out, margin or None, threads) -> rows that went on from each network but the last.
// This network is asked first, then the others (a tuple) in their order; see cascade.h. x is as in `run`.
PyObject* cascade(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 6) return refuse("cascade takes others, thresholds, x, out, margin and threads");
  std::vector<const Model*> stages{model_of(self)};
  const Py_ssize_t others = PyTuple_Check(args[0]) ? PyTuple_Size(args[0]) : 0;
  if (others < 1) return refuse("the other networks are a tuple of at least one");
  for (Py_ssize_t i = 0; i < others; i++) {
    PyObject* other = PyTuple_GetItem(args[0], i);
    if (Py_TYPE(other) != Py_TYPE(self)) return refuse("a cascade is made of networks");
    stages.push_back(model_of(other));
  }
  for (const Model* stage : stages)
    if (!stage) return nullptr;
  View thresholds(args[1], PyBUF_ND | PyBUF_FORMAT);
  if (!thresholds) return nullptr;
  if (thresholds->len != others * 4 || !holds(thresholds, kFloat32)) return refuse("one float32 threshold for each other network");
  const long threads = PyLong_AsLong(args[5]);
  if (threads == -1 && PyErr_Occurred()) return nullptr;
  const Net& net = stages[0]->net();
  View x(args[2], PyBUF_STRIDES | PyBUF_FORMAT);
  if (!x) return nullptr;
  if (!takes(x, net)) return refuse(kOtherRows);
  const int64_t rows = x->shape[0];
  View out(args[3], PyBUF_ND | PyBUF_WRITABLE);
  if (!out) return nullptr;
  if (out->len != rows * 8) return refuse("`out` has another size than the answers");
  CascadeJob job{(const uint8_t*)x->buf, x->strides[0], (int64_t*)out->buf, nullptr};
  std::vector<int64_t> went_on((size_t)others, 0);
  try {
    const Cascade whole(stages, (const float*)thresholds->buf);
    const auto work = [&] {
      Py_BEGIN_ALLOW_THREADS;
      whole.run(job, rows, (int)threads, went_on.data());
      Py_END_ALLOW_THREADS;
    };
    if ((args[4] != Py_None) != (stages.back()->net().output == kMargin))
      return refuse("a margin is given where, and only where, the last network has one");
    if (args[4] == Py_None) {
      work();
    } else {
      View margin(args[4], PyBUF_ND | PyBUF_WRITABLE);
      if (!margin) return nullptr;
      if (margin->len != rows * 4) return refuse("`margin` has another size than the answers");
      job.margin = (float*)margin->buf;
      work();
    }
  } catch (const std::invalid_argument& error) {
    return refuse(error.what());
  }
  PyObject* counts = PyTuple_New(others);
  for (Py_ssize_t i = 0; counts && i < others; i++)
    if (PyTuple_SetItem(counts, i, PyLong_FromLongLong(went_on[(size_t)i])) != 0) Py_CLEAR(counts);
  return counts;
}

PyMethodDef kMethods[] = {
    {"one", one, METH_O, nullptr},
    {"set_other", set_other, METH_O, nullptr},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, nullptr},
    {"cascade", (PyCFunction)(void (*)(void))cascade, METH_FASTCALL, nullptr},
    {"measure", measure, METH_NOARGS, nullptr},
    {"set_ways", set_ways, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_new, (void*)make},
    {Py_tp_dealloc, (void*)drop},
    {Py_tp_methods, kMethods},
    {0, nullptr},
};

PyType_Spec kSpec = {"gigamlp.kernels.cpu._native.Net", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, kSlots};

PyMethodDef kFunctions[] = {
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, kFunctions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* module = PyModule_Create(&kModule);
  PyObject* type = module ? PyType_FromSpec(&kSpec) : nullptr;
  if (!type || PyModule_AddObject(module, "Net", type) != 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
