// A team of the OpenMP runtime that does nothing. The runtime keeps its threads, asleep, for as long as the thread that
// called this lives.
void crowd(long threads) {
    long seen = 0;
#pragma omp parallel num_threads(threads) reduction(+ : seen)
    seen += 1;
    (void)seen;
}
