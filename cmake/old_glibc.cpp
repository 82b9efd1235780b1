// For wheels: names of glibc and libstdc++ as their releases of 2018 have them, so that the libraries load wherever
// torch's wheels do (manylinux_2_28). The linker of a newer glibc would take newer versions of these functions. The old
// ones compute the same; they set errno and call matherr's successor, which nobody here reads. OldGlibc.cmake wraps the
// names.
#include <sys/stat.h>

#include <dlfcn.h>

#include <new>

// libstdc++ asks whether threads run, to save an atomic operation; glibc has the variable from 2.32 on. 0: they may.
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded = 0;

extern "C" {

double old_exp(double);
double old_exp2(double);
double old_log(double);
double old_log2(double);
double old_pow(double, double);
int old_dladdr(const void*, Dl_info*);
int old_fxstat(int version, int descriptor, struct stat*);
int old_xstat(int version, const char* path, struct stat*);

__asm__(".symver old_exp, exp@GLIBC_2.2.5");
__asm__(".symver old_exp2, exp2@GLIBC_2.2.5");
__asm__(".symver old_log, log@GLIBC_2.2.5");
__asm__(".symver old_log2, log2@GLIBC_2.2.5");
__asm__(".symver old_pow, pow@GLIBC_2.2.5");
__asm__(".symver old_dladdr, dladdr@GLIBC_2.2.5");
__asm__(".symver old_fxstat, __fxstat@GLIBC_2.2.5");
__asm__(".symver old_xstat, __xstat@GLIBC_2.2.5");

#define ATTNPACK_HIDDEN [[gnu::visibility("hidden")]]
ATTNPACK_HIDDEN double __wrap_exp(double x) { return old_exp(x); }
ATTNPACK_HIDDEN double __wrap_exp2(double x) { return old_exp2(x); }
ATTNPACK_HIDDEN double __wrap_log(double x) { return old_log(x); }
ATTNPACK_HIDDEN double __wrap_log2(double x) { return old_log2(x); }
ATTNPACK_HIDDEN double __wrap_pow(double x, double y) { return old_pow(x, y); }
ATTNPACK_HIDDEN int __wrap_dladdr(const void* address, Dl_info* info) { return old_dladdr(address, info); }
ATTNPACK_HIDDEN int __wrap_fstat(int descriptor, struct stat* status) { return old_fxstat(1, descriptor, status); }
ATTNPACK_HIDDEN int __wrap_stat(const char* path, struct stat* status) { return old_xstat(1, path, status); }

// Functions that headers of GCC 11 and later call. libattnpack finds them in torch's libraries, libattnpack_kernels has
// no torch.
[[noreturn]] ATTNPACK_HIDDEN void throw_bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_length() { throw std::bad_array_new_length(); }

// std::exception_ptr is a pointer to the exception. Its copy and its end were functions of the library before the parts
// of them were.
void copy_exception(void** to, void* const* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void end_exception(void** pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
ATTNPACK_HIDDEN void add_reference(void** pointer) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
ATTNPACK_HIDDEN void release(void** pointer) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void add_reference(void** pointer) {
  void* one_more;  // which nobody gives up
  copy_exception(&one_more, pointer);
}
void release(void** pointer) {
  end_exception(pointer);
  *pointer = nullptr;
}
}
