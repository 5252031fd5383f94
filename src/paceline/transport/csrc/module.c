/* The library as an extension module, since setuptools builds those. Python loads it with ctypes (library.py) and calls
 * all of pl.h so, but for one function: ctypes takes 1.3 us for the nine arguments of an all_reduce, which itself takes
 * less than that when it is small. This is the only file that knows of Python.
 *
 * [Note: signals]
 * Python runs signal handlers between two of its own instructions, on its main thread, which may be deep in a wait of
 * ours for minutes. So long waits ask here, a few times a second, whether one wants to run. What it raises (Ctrl-C)
 * cannot pass through C: it is kept, the wait ends, and kernel.py raises it there.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pl.h"

PyDoc_STRVAR(all_reduce_doc, "all_reduce(channel, address, count, dtype, op, timeout_s)\n\n"
                             "In place, on this thread. None if it ended well, else the handle of the job.");

static PyObject *all_reduce(PyObject *module, PyObject *const *arguments, Py_ssize_t n) {
    (void)module;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "all_reduce takes 6 arguments, not %zd", n);
    void *channel = PyLong_AsVoidPtr(arguments[0]), *at = PyLong_AsVoidPtr(arguments[1]);
    const unsigned long long count = PyLong_AsUnsignedLongLong(arguments[2]);
    const long dtype = PyLong_AsLong(arguments[3]), op = PyLong_AsLong(arguments[4]);
    const double timeout_s = PyFloat_AsDouble(arguments[5]);
    pl_job *job;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    job = pl_all_reduce(channel, at, at, count, (int)dtype, (int)op, 1.0, timeout_s, 1);
    Py_END_ALLOW_THREADS
    if (job) return PyLong_FromVoidPtr(job);
    Py_RETURN_NONE;
}

static PyObject *raised; /* by a signal handler, in a wait; under the GIL */

static int on_main_thread(void) { return syscall(SYS_gettid) == getpid(); }

static PyObject *take_exception(void) {
#if PY_VERSION_HEX >= 0x030c0000
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
                               "What a signal handler has raised in a wait of this thread, once, or None.");

static PyObject *interruption(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    if (!raised || !on_main_thread()) Py_RETURN_NONE;
    PyObject *taken = raised;
    raised = NULL;
    return taken;
}

static PyMethodDef methods[] = {
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
