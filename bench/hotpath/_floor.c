/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a call from Python costs at least: methods that do nothing but one thing that no library
 * can do without.  Arguments come as they come to a compiled method (an array, names allowed); an
 * object is of a fixed size, without the garbage collector, and its memory is used again at once.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    PyObject_HEAD
    void *held[4];
} Thing;

static PyTypeObject thing_type;
static Thing *kept; /* one is enough: who makes and drops in turns finds it */

static PyObject *thing_new(void)
{
    Thing *made = kept;
    if (made == NULL)
        return (PyObject *)PyObject_New(Thing, &thing_type);
    kept = NULL;
    return PyObject_Init((PyObject *)made, &thing_type);
}

static void thing_dealloc(PyObject *self)
{
    if (kept == NULL)
        kept = (Thing *)self;
    else
        PyObject_Free(self);
}

static PyObject *nothing(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    (void)self, (void)args, (void)nargs, (void)names;
    Py_RETURN_NONE;
}

static PyObject *nothing_given(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    Py_RETURN_NONE;
}

static PyObject *make(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return thing_new();
}

static PyObject *look(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    Py_buffer view;
    (void)self, (void)nargs, (void)names;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE))
        return NULL;
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *bytes96(PyObject *self, PyObject *none)
{
    static const char key[96];
    (void)self, (void)none;
    return PyBytes_FromStringAndSize(key, sizeof(key));
}

static PyObject *enter(PyObject *self, PyObject *none)
{
    (void)none;
    return Py_NewRef(self);
}

#define WITH_ARGUMENTS(function) \
    (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef thing_methods[] = {
    {"call0", nothing_given, METH_NOARGS, NULL},
    {"call", WITH_ARGUMENTS(nothing), "with arguments, which it does not look at"},
    {"make", make, METH_NOARGS, "an object"},
    {"look", WITH_ARGUMENTS(look), "get and release a buffer"},
    {"bytes96", bytes96, METH_NOARGS, NULL},
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", WITH_ARGUMENTS(nothing), NULL},
    {NULL, NULL, 0, NULL},
};

/* The first macro ends with a comma of its own. */
/* clang-format off */
static PyTypeObject thing_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "floor.Thing",
    .tp_basicsize = sizeof(Thing),
    .tp_dealloc = thing_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = thing_methods,
};
/* clang-format on */

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "floor",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit_floor(void)
{
    PyObject *made, *thing;
    if (PyType_Ready(&thing_type) < 0 || (made = PyModule_Create(&module)) == NULL)
        return NULL;
    thing = thing_new();
    if (thing == NULL || PyModule_AddObjectRef(made, "thing", thing) < 0)
        Py_CLEAR(made);
    Py_XDECREF(thing);
    return made;
}
