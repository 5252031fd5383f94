/* The library as an extension module, since setuptools builds those. Python loads it with ctypes (library.py) and calls
 * the functions of pl.h through ctypes. The all_reduce can also be called without ctypes, which takes 1.3 us for its
 * eight arguments, more than a small all_reduce itself ([Note: one look at a tensor]). This is the only file that knows
 * of Python.
 *
 * [Note: signals]
 * Python runs signal handlers between two of its own instructions, on its main thread, which may be deep in a wait of
 * ours for minutes. So long waits ask here, a few times a second, whether one wants to run. What it raises (Ctrl-C)
 * cannot pass through C: it is kept, the wait ends, and kernel.py raises it there.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
/* setup.py defines Py_LIMITED_API: one build then serves every Python from 3.10 on. */
#include <Python.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dlpack.h"
#include "fold.h"
#include "pl.h"

/* -- tensors ------------------------------------------------------------------------------------------------------- */

/* [Note: one look at a tensor]
 * To ask a tensor in Python where it is, how many elements it has, of which kind and in which order takes a call each,
 * and after a backward all that code has left the caches: 3 us of the 20 that 1 MB takes among two ranks. DLPack tells
 * all of it in one call. What it does not tell, or what is not plain memory, is left to Python's way.
 */
static PyTypeObject *tensor_types[2];
static const dlpack_exchange *tensors;
static PyObject *is_neg;

PyDoc_STRVAR(know_tensors_doc, "know_tensors(one, other)\n\n"
                               "The types that all_reduce takes. It does not take subclasses, which may be anything,\n"
                               "and it takes nothing if these types have no DLPack of a version that is known here.");

static PyObject *know_tensors(PyObject *module, PyObject *const *types, Py_ssize_t n) {
    (void)module;
    if (n != 2 || !PyType_Check(types[0]) || !PyType_Check(types[1]))
        return PyErr_Format(PyExc_TypeError, "know_tensors takes 2 types");
    if (!is_neg && !(is_neg = PyUnicode_InternFromString("is_neg"))) return NULL;
    PyObject *capsule = PyObject_GetAttrString(types[0], "__dlpack_c_exchange_api__");
    const dlpack_exchange *found = capsule ? PyCapsule_GetPointer(capsule, DLPACK_CAPSULE) : NULL;
    Py_XDECREF(capsule); /* the table stays as long as the process */
    PyErr_Clear();
    const int known = found && found->major == DLPACK_MAJOR && found->minor >= DLPACK_LEAST_MINOR && found->describe;
    tensors = known ? found : NULL;
    for (int k = 0; k < 2; k++) tensor_types[k] = (PyTypeObject *)Py_NewRef(types[k]);
    Py_RETURN_NONE;
}

/* The dtype, or -1 if we do not have it, or if bytes alone do not tell a value (complex ones may be conjugated). */
static int dtype_of(const dlpack_tensor *t) {
    static const signed char dtypes[][4] = {/* 8, 16, 32, 64 bits */
        [DLPACK_INT] = {PL_I8, PL_I16, PL_I32, PL_I64},
        [DLPACK_UINT] = {PL_U8, PL_U16, PL_U32, PL_U64},
        [DLPACK_FLOAT] = {-1, PL_F16, PL_F32, PL_F64},
        [3] = {-1, -1, -1, -1},
        [DLPACK_BFLOAT] = {-1, PL_BF16, -1, -1},
        [5] = {-1, -1, -1, -1},
        [DLPACK_BOOL] = {PL_BOOL, -1, -1, -1},
    };
    if (t->lanes != 1 || t->code >= sizeof dtypes / sizeof *dtypes) return -1;
    switch (t->bits) {
    case 8: return dtypes[t->code][0];
    case 16: return dtypes[t->code][1];
    case 32: return dtypes[t->code][2];
    case 64: return dtypes[t->code][3];
    default: return -1;
    }
}

/* The number of elements, or -1 if they do not lie one after another. */
static int64_t count_of(const dlpack_tensor *t) {
    int64_t count = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->strides && t->shape[d] != 1 && t->strides[d] != count) return -1;
        count *= t->shape[d];
    }
    return count;
}

/* Is it a view of real numbers whose signs are changed when they are read? DLPack does not tell. */
static int is_negated(PyObject *tensor) {
    PyObject *answer = PyObject_CallMethodObjArgs(tensor, is_neg, NULL);
    const int yes = answer != Py_False;
    Py_XDECREF(answer);
    return yes;
}

/* False, without an exception, if the tensor is not plain memory of a CPU. */
static int look_at(PyObject *tensor, dlpack_tensor *t, int *dtype, int64_t *count) {
    if (!tensors || (Py_TYPE(tensor) != tensor_types[0] && Py_TYPE(tensor) != tensor_types[1])) return 0;
    if (tensors->describe(tensor, t) == 0 && t->device_type == DLPACK_CPU && (*dtype = dtype_of(t)) >= 0 &&
        (*count = count_of(t)) >= 0 && (t->data || !*count) && !is_negated(tensor))
        return 1;
    PyErr_Clear(); /* Python's way looks closer, and says it better */
    return 0;
}

/* -- collectives --------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(all_reduce_doc, "all_reduce(endpoint, tensor, op, timeout_s)\n\n"
                             "In place, on this thread. None if it ended well, the handle of the job if not, and\n"
                             "False if nothing was done: the tensor is not plain memory, or this cannot be done with\n"
                             "its elements.");

static PyObject *all_reduce(PyObject *module, PyObject *const *arguments, Py_ssize_t n) {
    (void)module;
    if (n != 4) return PyErr_Format(PyExc_TypeError, "all_reduce takes 4 arguments, not %zd", n);
    void *endpoint = PyLong_AsVoidPtr(arguments[0]);
    const long op = PyLong_AsLong(arguments[2]);
    const double timeout_s = PyFloat_AsDouble(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    dlpack_tensor t;
    int dtype;
    int64_t count;
    if (!look_at(arguments[1], &t, &dtype, &count) || pl_fold_refused(dtype, (int)op)) Py_RETURN_FALSE;
    void *at = (char *)t.data + t.byte_offset;
    pl_job *job;
    Py_BEGIN_ALLOW_THREADS
    job = pl_all_reduce(endpoint, at, at, (uint64_t)count, dtype, (int)op, timeout_s, 1);
    Py_END_ALLOW_THREADS
    if (job) return PyLong_FromVoidPtr(job);
    Py_RETURN_NONE;
}

/* -- signals ------------------------------------------------------------------------------------------------------- */

static PyObject *raised; /* by a signal handler, in a wait; under the GIL */

static int on_main_thread(void) { return syscall(SYS_gettid) == getpid(); }

static PyObject *take_exception(void) {
#if PY_VERSION_HEX >= 0x030c0000 && !defined(Py_LIMITED_API)
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace) PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
#endif
}

static int is_interrupted(void) {
    if (!on_main_thread()) return 0;
    PyGILState_STATE state = PyGILState_Ensure();
    if (!raised && PyErr_CheckSignals() != 0) raised = take_exception();
    const int yes = raised != NULL;
    PyGILState_Release(state);
    return yes;
}

PyDoc_STRVAR(interruption_doc, "interruption()\n\n"
                               "What a signal handler has raised in a wait of this thread, or None. It is given once.");

static PyObject *interruption(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    if (!raised || !on_main_thread()) Py_RETURN_NONE;
    PyObject *taken = raised;
    raised = NULL;
    return taken;
}

static PyMethodDef methods[] = {
    {"know_tensors", (PyCFunction)(void (*)(void))know_tensors, METH_FASTCALL, know_tensors_doc},
    {"interruption", interruption, METH_NOARGS, interruption_doc},
    {"all_reduce", (PyCFunction)(void (*)(void))all_reduce, METH_FASTCALL, all_reduce_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__kernel(void) {
    pl_on_interrupt(is_interrupted);
    return PyModuleDef_Init(&definition);
}
