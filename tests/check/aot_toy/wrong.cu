// Does not compile, and is meant not to.
extern "C" __global__ void wrong(int* a) { a[0] = undefined_name; }
