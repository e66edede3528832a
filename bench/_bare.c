/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The floors: process_vm_readv, process_vm_writev and memcpy, called from Python with nothing
 * around them.  No object is made but the result None, and the GIL is kept: whatever a library
 * does beside the system call is then in the ratio to these.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

/* (pid, remote address, buffer) */
static PyObject *move(PyObject *const *args, Py_ssize_t nargs, int write)
{
    struct iovec local, remote;
    Py_buffer view;
    ssize_t n;
    size_t left;
    pid_t pid;

    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "pid, address, buffer");
        return NULL;
    }
    pid = (pid_t)PyLong_AsLong(args[0]);
    remote.iov_base = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[2], &view, write ? 0 : PyBUF_WRITABLE))
        return NULL;
    local.iov_base = view.buf;
    /* The kernel moves at most 2 GiB less a page in one call; ours are up to 1 GiB. */
    for (left = (size_t)view.len; left; left -= (size_t)n) {
        local.iov_len = remote.iov_len = left;
        n = write ? process_vm_writev(pid, &local, 1, &remote, 1, 0)
                  : process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (n <= 0)
            break;
        local.iov_base = (char *)local.iov_base + n;
        remote.iov_base = (char *)remote.iov_base + n;
    }
    PyBuffer_Release(&view);
    if (left)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *bare_readv(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return move(args, nargs, 0);
}

static PyObject *bare_writev(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return move(args, nargs, 1);
}

/* (to, from): two buffers of the same length */
static PyObject *bare_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer to, from;

    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "to, from");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE))
        return NULL;
    if (PyObject_GetBuffer(args[1], &from, 0)) {
        PyBuffer_Release(&to);
        return NULL;
    }
    if (to.len == from.len)
        memcpy(to.buf, from.buf, (size_t)to.len);
    else
        PyErr_SetString(PyExc_ValueError, "buffers of different length");
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"readv", (PyCFunction)(void (*)(void))bare_readv, METH_FASTCALL,
     "readv(pid, address, into): process_vm_readv"},
    {"writev", (PyCFunction)(void (*)(void))bare_writev, METH_FASTCALL,
     "writev(pid, address, data): process_vm_writev"},
    {"copy", (PyCFunction)(void (*)(void))bare_copy, METH_FASTCALL, "copy(to, from): memcpy"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "bare", "System calls with nothing around them.", -1, methods,
};

PyMODINIT_FUNC PyInit_bare(void)
{
    return PyModule_Create(&module);
}
