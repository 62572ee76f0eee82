/* Counts what CPython allocates as objects and as their memory; what free lists hand out again is not counted. */
#include <Python.h>

static const PyMemAllocatorDomain domains[] = {PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};
static PyMemAllocatorEx counted[2];
static unsigned long long allocations;

static void *count_malloc(void *of, size_t size) {
    PyMemAllocatorEx *as = of;
    allocations++;
    return as->malloc(as->ctx, size);
}

static void *count_calloc(void *of, size_t number, size_t size) {
    PyMemAllocatorEx *as = of;
    allocations++;
    return as->calloc(as->ctx, number, size);
}

static void *count_realloc(void *of, void *memory, size_t size) {
    PyMemAllocatorEx *as = of;
    allocations++;
    return as->realloc(as->ctx, memory, size);
}

static void pass_free(void *of, void *memory) {
    PyMemAllocatorEx *as = of;
    as->free(as->ctx, memory);
}

void begin(void) {
    allocations = 0;
    for (int each = 0; each < 2; each++) {
        PyMem_GetAllocator(domains[each], &counted[each]);
        PyMemAllocatorEx counting = {&counted[each], count_malloc, count_calloc, count_realloc, pass_free};
        PyMem_SetAllocator(domains[each], &counting);
    }
}

unsigned long long end(void) {
    for (int each = 0; each < 2; each++) {
        PyMem_SetAllocator(domains[each], &counted[each]);
    }
    return allocations;
}
