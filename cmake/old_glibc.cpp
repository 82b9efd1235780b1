// For wheels: names of glibc as releases from 2.28 on have them, so that the libraries load wherever torch's wheels do
// (manylinux_2_28). The linker of a newer glibc would take newer versions of these functions. The old ones compute the
// same; they set errno and call matherr's successor, which nobody here reads. CMakeLists.txt wraps the names.
#include <sys/stat.h>

#include <dlfcn.h>

// libstdc++ asks whether threads run, to save an atomic operation; glibc has the variable from 2.32 on. 0: they may.
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded = 0;

extern "C" {

double old_exp2(double);
double old_log(double);
double old_pow(double, double);
int old_dladdr(const void*, Dl_info*);
int old_fxstat(int version, int descriptor, struct stat*);

__asm__(".symver old_exp2, exp2@GLIBC_2.2.5");
__asm__(".symver old_log, log@GLIBC_2.2.5");
__asm__(".symver old_pow, pow@GLIBC_2.2.5");
__asm__(".symver old_dladdr, dladdr@GLIBC_2.2.5");
__asm__(".symver old_fxstat, __fxstat@GLIBC_2.2.5");

#define ATTNPACK_HIDDEN [[gnu::visibility("hidden")]]
ATTNPACK_HIDDEN double __wrap_exp2(double x) { return old_exp2(x); }
ATTNPACK_HIDDEN double __wrap_log(double x) { return old_log(x); }
ATTNPACK_HIDDEN double __wrap_pow(double x, double y) { return old_pow(x, y); }
ATTNPACK_HIDDEN int __wrap_dladdr(const void* address, Dl_info* info) { return old_dladdr(address, info); }
ATTNPACK_HIDDEN int __wrap_fstat(int descriptor, struct stat* status) { return old_fxstat(1, descriptor, status); }
}
