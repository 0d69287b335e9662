// Calls of C functions one after another, as they were recorded: a step without Python between its calls.
#include <string.h>

// What a call passes: integers and addresses, then floats, as functions that can be recorded take them.
#define I1 long
#define I2 I1, long
#define I3 I2, long
#define I4 I3, long
#define I5 I4, long
#define I6 I5, long
#define I7 I6, long
#define I8 I7, long
#define I9 I8, long
#define I10 I9, long
#define I11 I10, long
#define I12 I11, long
#define I13 I12, long
#define I14 I13, long
#define I15 I14, long
#define I16 I15, long
#define I17 I16, long
#define I18 I17, long
#define I19 I18, long
#define I20 I19, long
#define I21 I20, long
#define I22 I21, long
#define I23 I22, long
#define I24 I23, long
#define I25 I24, long
#define I26 I25, long
#define I27 I26, long
#define I28 I27, long
#define A1 a[0]
#define A2 A1, a[1]
#define A3 A2, a[2]
#define A4 A3, a[3]
#define A5 A4, a[4]
#define A6 A5, a[5]
#define A7 A6, a[6]
#define A8 A7, a[7]
#define A9 A8, a[8]
#define A10 A9, a[9]
#define A11 A10, a[10]
#define A12 A11, a[11]
#define A13 A12, a[12]
#define A14 A13, a[13]
#define A15 A14, a[14]
#define A16 A15, a[15]
#define A17 A16, a[16]
#define A18 A17, a[17]
#define A19 A18, a[18]
#define A20 A19, a[19]
#define A21 A20, a[20]
#define A22 A21, a[21]
#define A23 A22, a[22]
#define A24 A23, a[23]
#define A25 A24, a[24]
#define A26 A25, a[25]
#define A27 A26, a[26]
#define A28 A27, a[27]
#define EACH(with) \
    with(1) with(2) with(3) with(4) with(5) with(6) with(7) with(8) with(9) with(10) with(11) with(12) with(13) \
    with(14) with(15) with(16) with(17) with(18) with(19) with(20) with(21) with(22) with(23) with(24) with(25) \
    with(26) with(27) with(28)

// The most integers and floats of a call.
long max_integers(void) { return 28; }
long max_floats(void) { return 3; }

static inline float number(long word) {
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

#define NONE(n) \
    case n: ((void (*)(I##n))function)(A##n); break;
#define ONE(n) \
    case n: ((void (*)(I##n, float))function)(A##n, number(a[n])); break;
#define TWO(n) \
    case n: ((void (*)(I##n, float, float))function)(A##n, number(a[n]), number(a[n + 1])); break;
#define THREE(n) \
    case n: \
        ((void (*)(I##n, float, float, float))function)(A##n, number(a[n]), number(a[n + 1]), number(a[n + 2])); \
        break;

// calls: [count, 3] address of the function, its integers and its floats. a: the words of all calls, one call's after
// another's.
void replay(const long *calls, long count, const long *a) {
    for (long i = 0; i < count; i++) {
        void (*const function)(void) = (void (*)(void))calls[3 * i];
        const long integers = calls[3 * i + 1], floats = calls[3 * i + 2];
        if (floats == 0) switch (integers) { EACH(NONE) }
        if (floats == 1) switch (integers) { EACH(ONE) }
        if (floats == 2) switch (integers) { EACH(TWO) }
        if (floats == 3) switch (integers) { EACH(THREE) }
        a += integers + floats;
    }
}
